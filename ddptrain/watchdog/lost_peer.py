"""Whether an error follows from another rank's end."""

import re
import traceback

import torch.distributed as dist

from ddptrain.watchdog.hang_report import waits


def from_a_lost_rank(error: BaseException) -> bool:
    """Whether an error is a collective's complaint that another rank does not answer any more: by its
    text, and by where it was raised, for a recipe may lose connections of its own."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport")
    frames = traceback.extract_tb(error.__traceback__)
    in_a_collective = bool(frames) and waits([(frame.filename, frame.name) for frame in frames]) != ""
    is_ours = isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)
    return isinstance(error, RuntimeError) and in_a_collective and is_ours


def address_of_peer(error: BaseException) -> str:
    """The address that a collective's complaint names; '' if it names none."""
    found = re.search(r"\[([0-9a-fA-F.:]+)\]:\d+", str(error))
    return found[1].removeprefix("::ffff:") if found else ""
