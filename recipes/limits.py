"""What the sizes of a model may be."""

from ddptrain.api import UserError


def check_model(width: int, layers: int, dropout: float) -> None:
    """Raise UserError naming the first that makes no sense."""
    for name, value in (("width", width), ("layers", layers)):
        if value < 1:
            raise UserError(f"model.{name}={value}: must be 1 or more.")
    if not 0 <= dropout < 1:
        raise UserError(f"model.dropout={dropout}: must be in [0, 1).")
