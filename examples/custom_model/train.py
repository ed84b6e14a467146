"""Train your own model, data set, loss and metrics on two processes: `python train.py [--epochs N]`.

They are in separate files because ranks are separate processes, which import them. For the same reason `main` is
called below `if __name__ == "__main__"`.
"""

from __future__ import annotations

import argparse

from data import make_stripes
from loss import focal
from metric import confidence, top_2
from model import build

import paceline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--output-dir")
    arguments = parser.parse_args()

    run = paceline.train(
        "shapes-cnn",
        model=build,
        data=make_stripes,
        loss=focal,
        metrics=[top_2, confidence],
        epochs=arguments.epochs,
        output_dir=arguments.output_dir,
        global_batch_size=48,
        base_lr=0.2,
        augment="none",  # a flip would turn one diagonal into the other
        processes=2,
    )
    print(run.metrics("val"))

    # Predict the first pictures of the test set.
    _, (images, labels), classes = make_stripes(seed=run.config.train.seed)
    for answer, label in zip(run.predict(images[:5]), labels[:5], strict=True):
        print(f"{classes[label]:<11} is {answer.probability:.1%} {answer.label}")


if __name__ == "__main__":
    main()
