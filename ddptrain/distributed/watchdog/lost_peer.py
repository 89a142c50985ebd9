"""Errors that are the consequence of another rank's end."""

import re
import traceback

import torch.distributed as dist

from ddptrain.distributed.watchdog.hang_report import waits


def from_a_lost_rank(error: BaseException) -> bool:
    """Whether an error was raised by a collective because another rank is gone: by its text, and by where it
    was raised, because a recipe may have its own connections."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport")
    frames = traceback.extract_tb(error.__traceback__)
    in_a_collective = bool(frames) and waits([(frame.filename, frame.name) for frame in frames]) != ""
    is_ours = isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)
    return isinstance(error, RuntimeError) and in_a_collective and is_ours


def address_of_peer(error: BaseException) -> str:
    """The address in a collective's error message; '' if there is none."""
    address = re.search(r"\[([0-9a-fA-F.:]+)\]:\d+", str(error))
    return address[1].removeprefix("::ffff:") if address else ""
