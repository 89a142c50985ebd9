"""Keys that there were once: what to use now."""

_TRANSFORM = "It is augment.transforms.{}, a node of torchvision.transforms.v2."
_REMOVED = {
    "data.augment.flip": "It is data.augment.horizontal_flip.",
    "data.augment.mirror": "It is data.augment.horizontal_flip.",
    "data.augment.upside_down": "It is data.augment.vertical_flip.",
    "data.augment.color_jitter": _TRANSFORM.format("color_jitter"),
    "data.augment.policy": _TRANSFORM.format("policy"),
    "data.augment.erasing": _TRANSFORM.format("erasing"),
    "data.side": "It is data.size.",
    "elastic": "Use strategy=strict for the same bits on any number of ranks; fast is the default.",
    "sweep.share": "A job's training is its own now; to begin with a common one: init.weights=<run>.",
    "train.step_limit": "A job's training is its own now; to begin with a common one: init.weights=<run>.",
    "sched.name": "Use the group: sched=cosine.",
    "log.tensorboard": "Use observers=[console,jsonl] without tensorboard.",
}


def what_to_use(key: str) -> str:
    """A sentence about a key that was removed, or ''."""
    return f" {_REMOVED[key]}" if key in _REMOVED else ""
