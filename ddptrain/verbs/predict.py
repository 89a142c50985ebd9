"""``predict``: what a trained model answers."""

from ddptrain.config.arguments import Arguments
from ddptrain.distributed.launcher.spinning import choose_spinning
from ddptrain.errors import ExitCode
from ddptrain.verbs.composing import recorded
from ddptrain.verbs.saved_run import CHECKPOINT_WORDS, read_run_with_settings
from ddptrain.verbs.verb import Verb

HELP = f"""\
python -m ddptrain predict run=<folder> [checkpoint=<which>] [the task's own words]

What a trained model answers. It needs the checkpoint alone where that knows enough of the data (images,
detection).

{CHECKPOINT_WORDS}

  images      source=<file|folder|'pattern'> [out=predictions] [top=3]: lines, predictions.csv, contact sheets
              with several labels a picture: threshold=0.5 instead of top
  masks       source=<file|folder|'pattern'> [out=predictions]: masks, and pictures with them
  detection   source=<file|folder|'pattern'> [out=predictions] [score=0.25]: pictures with boxes, labels
              source=<clip.mp4|rtsp://...|camera> [track=bytetrack]: a video with boxes, JSON lines
  text        [prompt='...'] [tokens=...] [temperature=...] [top_k=...] [seed=...]
  translation text='...' [beam=...]

  python -m ddptrain predict run=runs/cnn source=photos out=seen device=cpu"""


def predict(arguments: Arguments) -> int:
    """Words that are no keys of the config are for the task."""
    config, folder, checkpoint, settings = read_run_with_settings(arguments)
    choose_spinning()
    from ddptrain.run import predict

    with recorded():
        predict.run(config, folder, checkpoint, settings)
    return ExitCode.DONE


VERB = Verb(
    run=predict,
    summary="what a trained model answers: pictures, text",
    help=HELP,
    of_a_run=True,
)
