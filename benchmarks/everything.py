"""Every CPU table of docs/performance.md, text.md, finetuning.md, reliability.md, fit.md, and the picture.

python benchmarks/everything.py                      # in some three hours, 45 minutes of them for text.py
python benchmarks/everything.py throughput startup   # some
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PERFORMANCE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "images" / "throughput.png"
FILES = {
    "throughput": PERFORMANCE,
    "startup": PERFORMANCE,
    "pipelines": PERFORMANCE,
    "augmented": PERFORMANCE,
    "decoders": PERFORMANCE,
    "lstm": PERFORMANCE,
    "detection": PERFORMANCE,
    "busy": PERFORMANCE,
    "text": ROOT / "docs/text.md",
    "finetune": ROOT / "docs/finetuning.md",
    "strict": ROOT / "docs/reliability.md",
    "ports": ROOT / "docs/fit.md",
}


def main(asked: list[str]) -> None:
    if "--help" in asked or "-h" in asked:
        print(__doc__)
        return
    for name in asked or FILES:
        if name not in FILES:
            raise SystemExit(f"{name}: is none of {', '.join(FILES)}")
        command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--write", str(FILES[name])]
        subprocess.run([*command, *(["--plot", str(PICTURE)] if name == "throughput" else [])], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
