"""Formats durations."""


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any: 1:05, 2:00:31."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
