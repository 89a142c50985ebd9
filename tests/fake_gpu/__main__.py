"""``python tests/fake_gpu [--gpus=2] command ...``: runs a command on GPUs that are not there.

FAKE_GPU_NAME, FAKE_GPU_CAPABILITY (9.0), FAKE_GPU_MEMORY (bytes, by commas for several): what they are.
FAKE_NVML="Name=3": errors of NVML. FAKE_NCCL_TIMEOUT: seconds that a rank waits for others in a collective.
FAKE_GPU_WATCH=0: steps that wait, take memory or copy slowly do not fail.
"""

import os
import sys

import libraries


def main(words: list[str]) -> None:
    gpus = "1"
    if words and words[0].startswith("--gpus="):
        gpus = words.pop(0).partition("=")[2]
    if not words:
        sys.exit(__doc__)
    if why := libraries.why_not():
        sys.exit(why)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # of the GPUs that this machine has
    os.execvpe(words[0], words, {**os.environ, **libraries.environment(int(gpus))})


if __name__ == "__main__":
    main(sys.argv[1:])
