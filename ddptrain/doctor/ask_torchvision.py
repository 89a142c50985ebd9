"""In a child: does torchvision belong to this PyTorch? A pair that does not fit raises, or crashes."""

from importlib import metadata

from ddptrain.doctor.children import tell


def main() -> None:
    try:
        version = metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        version = ""
    tell("torchvision", {"version": version, "error": "it crashes when it is imported"})  # until it has not
    import torch

    try:
        from torchvision.ops import nms

        kept = nms(torch.tensor([[0.0, 0.0, 9.0, 9.0], [0.0, 0.0, 9.0, 8.0]]), torch.tensor([0.5, 0.9]), 0.5)
        error = "" if kept.tolist() == [1] else f"nms keeps boxes {kept.tolist()} where 1 is right"
    except (ImportError, RuntimeError, AttributeError) as failed:
        error = str(failed).splitlines()[0]
    tell("torchvision", {"version": version, "error": error})
