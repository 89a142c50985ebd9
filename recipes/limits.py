"""What the sizes of a model, and options of several recipes, may be."""

from ddptrain.api import UserError


def check_model(width: int, layers: int, dropout: float) -> None:
    """Raise UserError naming the first that makes no sense."""
    for name, value in (("width", width), ("layers", layers)):
        if value < 1:
            raise UserError(f"model.{name}={value}: must be 1 or more.")
    if not 0 <= dropout < 1:
        raise UserError(f"model.dropout={dropout}: must be in [0, 1).")


def check_label_smoothing(value: float) -> None:
    """Raise UserError unless it is in [0, 1)."""
    if not 0 <= value < 1:
        raise UserError(f"task.label_smoothing={value}: must be in [0, 1).")


def check_batch(batch: int | None) -> None:
    """Raise UserError for an exported model's number of samples that makes no sense; None stands for any."""
    if batch is not None and batch < 1:
        raise UserError(f"batch={batch}: must be 1 or more, or null for any.")
