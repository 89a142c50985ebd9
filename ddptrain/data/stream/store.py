"""Where a set or a mirrored run lies: a bucket, a web server or a folder. Objects are read and written whole;
obstore itself asks a store that fails again."""

import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, final

from ddptrain.errors import UserError, reason

if TYPE_CHECKING:
    from obstore.store import ObjectStore, RetryConfig

_SCHEMES = ("s3", "gs", "az", "http", "https")
_ATTEMPTS = 3
"""Of a transfer whose content is damaged."""
_PAUSE_S = 0.5
"""Before a transfer is begun anew."""
_PIECE = 8 * 2**20
"""Bytes handed over at a time."""
_STALLED_S = 30
"""A request that takes longer is begun anew."""
_REFUSED = re.compile(
    r"ExpiredToken|TokenRefreshRequired|InvalidToken|InvalidAccessKeyId|SignatureDoesNotMatch|RequestTimeTooSkewed"
    r"|AccessDenied|InvalidClientTokenId"
)
"""Error codes of S3 that come as a plain 400, and for which trying again is of no use."""
_OUR_FAULT = re.compile(r"status (4(?!08|29)\d\d|3\d\d)\b")
_ENDED = {"TimedOut": "it does not answer", "IncompleteMessage": "it has closed the connection"}
"""Ends of a request that have no words of the system's."""
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or a profile of ~/.aws",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


Result = TypeVar("Result")


class Damaged(Exception):
    """What was fetched is not what was asked for; it can be fetched again."""


class UnusableObject(UserError):
    """An object is not there, or is not what was written, also when it is fetched again."""


@final
class Store:
    """Objects by their keys below ``url``: s3://bucket/folder, gs://, az://, https://, or a folder.

    Credentials come from the environment, or, for S3, from the files that boto3 reads. retry_s: how long a
    store that does not answer, answers with 5xx or breaks off is asked again. key, what: the config key that
    names it, and what lies there, for messages. Any process may use it; each opens connections of its own.
    """

    def __init__(self, url: str, retry_s: float, key: str = "data.source.url", what: str = "the set") -> None:
        scheme, separator, _ = url.partition("://")
        if separator and scheme not in _SCHEMES:
            schemes = ", ".join(f"{name}://" for name in _SCHEMES)
            raise UserError(f"{key}={shown(url)}: must begin with {schemes}, or be a folder.")
        if separator and re.search(r"//[^/]*@|\?", url):
            raise UserError(
                f"{key}={shown(url)}: holds a password or a query, which would be written to the"
                " run's folder. Give credentials by the environment."
            )
        self.url = url.rstrip("/") if separator else str(Path(url).expanduser().absolute())
        self.shown = shown(self.url)
        self.retry_s = retry_s
        self.folder = None if separator else Path(self.url)
        self._key, self._what = key, what
        self._scheme = scheme if separator else ""
        self._opened: ObjectStore | None = None
        self._pid = 0

    def __reduce__(self) -> tuple[object, ...]:
        """A worker opens connections of its own."""
        return Store, (self.url, self.retry_s, self._key, self._what)

    def read(self, key: str, check: Callable[[bytes], None] = lambda content: None) -> bytes:
        """A small object. check: looks at it, and raises Damaged. Raises FileNotFoundError, or UserError as
        `download` does."""

        def once() -> bytes:
            content = self._read(key)
            check(content)
            return content

        return self._transfer(key, once)

    def size(self, key: str) -> int:
        """Bytes of an object. Raises as `download` does."""

        def once() -> int:
            if self.folder is not None:
                return (self.folder / key).stat().st_size
            import obstore

            return obstore.head(self._store(), key)["size"]

        try:
            return self._transfer(key, once)
        except FileNotFoundError:
            raise self._missing(key) from None

    def version(self, key: str) -> str:
        """What becomes another one where an object is replaced: its size, with its time of change or its
        entity tag. Raises as `download` does."""

        def once() -> str:
            if self.folder is not None:
                status = (self.folder / key).stat()
                return f"{status.st_size} {status.st_mtime_ns}"
            import obstore

            about = obstore.head(self._store(), key)
            return f"{about['size']} {about['e_tag']} {about['last_modified']}"

        try:
            return self._transfer(key, once)
        except FileNotFoundError:
            raise self._missing(key) from None

    def download(self, key: str, to: IO[bytes], check: Callable[[], None]) -> None:
        """An object into a file, from its beginning. check: looks at the file, and raises Damaged.

        Raises UserError naming the object where the store refuses it, lacks it, or has not delivered it whole
        after ``retry_s`` seconds.
        """

        def once() -> None:
            to.seek(0)
            self._copy(key, to)
            to.truncate()
            check()

        try:
            self._transfer(key, once)
        except FileNotFoundError:
            raise self._missing(key) from None

    def keys(self) -> set[str]:
        """Of all objects. Raises as `download` does."""

        def once() -> set[str]:
            if self.folder is not None:
                files = (path for path in self.folder.rglob("*") if path.is_file())
                return {str(path.relative_to(self.folder)) for path in files}
            import obstore

            return {about["path"] for page in obstore.list(self._store()) for about in page}

        try:
            return self._transfer("", once)
        except FileNotFoundError:
            raise UserError(
                f"{self._key}={self.shown}: there is no such bucket (404).", everywhere=False
            ) from None

    def write(self, key: str, content: bytes | IO[bytes]) -> None:
        """An object, in place of what is there: other readers see the old or the new one. content: or an open
        file, from its beginning. Raises as `download` does."""

        def once() -> None:
            if not isinstance(content, bytes):
                content.seek(0)
            if self.folder is not None:
                _write_file(self.folder / key, content)
                return
            import obstore

            obstore.put(self._store(), key, content, chunk_size=_chunk_size(content))

        self._changed(key, once)

    def delete(self, keys: Collection[str]) -> None:
        """Objects that need not be there. Raises as `download` does."""

        def once() -> None:
            if self.folder is not None:
                for key in keys:
                    (self.folder / key).unlink(missing_ok=True)
                return
            import obstore

            obstore.delete(self._store(), list(keys))

        if keys:
            self._changed(min(keys), once)

    def _changed(self, key: str, attempt: Callable[[], None]) -> None:
        try:
            self._transfer(key, attempt)
        except FileNotFoundError:
            raise UserError(
                f"{self._key}={self.shown}: there is no such bucket (404).", everywhere=False
            ) from None

    def _missing(self, key: str) -> UnusableObject:
        return UnusableObject(
            f"{self.shown}/{key}: is not there (404), and belongs to {self._what}. Was it removed, or"
            f" {self._what} written anew? Bring it back, or start a new run.",
            everywhere=False,
        )

    def _transfer(self, key: str, attempt: Callable[[], Result]) -> Result:
        """What an attempt returns. obstore asks a failing store again for ``retry_s`` seconds, and continues
        what broke off where the server can. What it can't continue is begun anew here within this time, and a
        few times what is damaged.
        """
        began, damaged = time.monotonic(), 0
        while True:
            try:
                return attempt()
            except (FileNotFoundError, UserError):
                raise
            except Damaged as error:
                damaged += 1
                if damaged == _ATTEMPTS:
                    raise UnusableObject(
                        f"{self.shown}/{key}: {error}, also when fetched again. It has changed since"
                        f" {self._what} was written, or is damaged there. Write {self._what} anew.",
                        everywhere=False,
                    ) from None
            except Exception as error:
                if not _of_a_store(error):
                    raise
                self._check_worth_it(key, error)
                if time.monotonic() - began >= self.retry_s:
                    raise UserError(
                        f"{self.shown}/{key}: was not available for {self.retry_s:.0f} seconds"
                        f" ({_reason(error)}). Is the store up?"
                        + " data.source.retry_s says how long to wait."
                        * self._key.startswith("data."),
                        everywhere=False,
                    ) from None
            time.sleep(_PAUSE_S)

    def _check_worth_it(self, key: str, error: Exception) -> None:
        """Raises UserError where trying again is of no use."""
        name, text = type(error).__name__, str(error)
        code = _REFUSED.search(text)
        if name in ("PermissionDeniedError", "UnauthenticatedError") or code:
            which = code.group() if code else "403" if name == "PermissionDeniedError" else "401"
            known = _CREDENTIALS.get(self._scheme)
            helps = f" Check {known}; have they expired?" if known else " May this machine read it?"
            raise UserError(
                f"{self.shown}/{key}: the store refuses it ({which}).{helps}", everywhere=False
            ) from None
        if status := _OUR_FAULT.search(text):
            raise UserError(
                f"{self.shown}/{key}: the store does not take the request ({status.group(1)}). Are address"
                " and region right?",
                everywhere=False,
            ) from None
        if isinstance(error, OSError) and self.folder is not None:
            raise UserError(f"{self.folder / key}: can't be read ({error.strerror}).", everywhere=False)

    def _read(self, key: str) -> bytes:
        if self.folder is not None:
            return (self.folder / key).read_bytes()
        import obstore

        return bytes(obstore.get(self._store(), key).bytes())

    def _copy(self, key: str, to: IO[bytes]) -> None:
        if self.folder is not None:
            with (self.folder / key).open("rb") as file:
                while piece := file.read(_PIECE):
                    to.write(piece)
            return
        import obstore

        for piece in obstore.get(self._store(), key).stream(min_chunk_size=_PIECE):
            to.write(piece)

    def _store(self) -> "ObjectStore":
        """obstore's threads don't outlive a fork, so each process has its own."""
        if self._opened is None or self._pid != os.getpid():
            self._opened = _connected(self.url, self._scheme, self.retry_s, self._key)
            self._pid = os.getpid()
        return self._opened


def _write_file(target: Path, content: bytes | IO[bytes]) -> None:
    """Raises UserError, and leaves nothing of what did not fit."""
    aside = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            file.write(content) if isinstance(content, bytes) else shutil.copyfileobj(content, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise UserError(f"{target}: can't be written ({error.strerror}).", everywhere=False) from error


def _chunk_size(content: bytes | IO[bytes]) -> int:
    """Of an upload in parts, of which S3 takes 10,000."""
    size = len(content) if isinstance(content, bytes) else os.fstat(content.fileno()).st_size
    return max(_PIECE, size // 5000)


def shown(url: str) -> str:
    """An address for people, without a password or a key in it. A path, which has neither, is as it is."""
    if "://" not in url:
        return url
    return re.sub(r"//[^/]*@", "//***@", url.partition("?")[0])


def _connected(url: str, scheme: str, retry_s: float, key: str) -> "ObjectStore":
    if find_spec("obstore") is None:
        raise UserError(f"{key}={shown(url)}: needs obstore: pip install 'ddptrain[stream]'")
    more: dict[str, Any] = {}
    if scheme == "s3" and "AWS_ACCESS_KEY_ID" not in os.environ:
        more = _from_usual_files(key)
    try:
        return _client(url, retry_s, more)
    except (ValueError, OSError, UserError):
        raise
    except Exception as error:
        raise UserError(
            f"{key}={shown(url)}: can't be opened ({_reason(error)}). Check"
            f" {_CREDENTIALS.get(scheme, 'the address')}."
        ) from error


def _client(url: str, retry_s: float, more: dict[str, Any]) -> "ObjectStore":
    from obstore.store import from_url

    client: Any = {"timeout": f"{_STALLED_S}s", "allow_http": True}
    # a number that is never reached: the time alone is the limit
    retries: RetryConfig = {"max_retries": 2**31, "retry_timeout": timedelta(seconds=retry_s)}
    return from_url(url, client_options=client, retry_config=retries, **more)


def _of_a_store(error: Exception) -> bool:
    """Whether the store, or the way to it, is at fault; obstore's kinds of errors say little more."""
    return isinstance(error, OSError) or type(error).__module__.startswith("obstore")


def _from_usual_files(key: str) -> dict[str, Any]:
    """What ~/.aws, or a machine's own role, says."""
    import boto3  # type: ignore[import-untyped]
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        session = boto3.Session()
        credentials = session.get_credentials()
    except Exception as error:  # of botocore: a profile that does not exist, a file that can't be read
        raise UserError(f"{key}: credentials for s3:// can't be read ({error}).") from error
    if credentials is None:
        if os.environ.get("AWS_SKIP_SIGNATURE"):
            return {}
        raise UserError(
            f"{key}: there are no credentials for s3://: set {_CREDENTIALS['s3']}. For a bucket"
            " that anybody may read: AWS_SKIP_SIGNATURE=true"
        )
    return {"credential_provider": Boto3CredentialProvider(session)}


def _reason(error: Exception) -> str:
    """An error of obstore's in a few words, and whom it has asked: a status, or the system's own words, which
    stand innermost in what it prints of its own objects."""
    head, _, inner = " ".join(str(error).split()).partition(" Debug source: ")
    host = re.search(r"performing [A-Z]+ \w+://([^/\s@]*@)?([^/\s?]+)", head)
    status = re.search(r"\b[45]\d\d [A-Z][A-Za-z ]+", head)
    system = re.findall(r'(?:message|error): "([^"]+)"', inner)
    ended = next((words for name, words in _ENDED.items() if name in inner), None)
    why = status.group().strip() if status else system[-1] if system else ended
    if why is None:
        why = reason(Exception(re.sub(r"https?://\S+", lambda address: shown(address.group()), head)))
    return f"{why}, at {host[2]}" if host else why
