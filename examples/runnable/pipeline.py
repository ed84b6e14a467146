"""Paceline as a Runnable pipeline: prepare_data -> train -> aggregate -> evaluate -> report.

    python examples/runnable/pipeline.py

Parameters are in parameters.yaml; docs/guides/runnable.md describes presets, overrides, retries and Argo.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.integrations.runnable import steps
from paceline.integrations.runnable.start import run_pipeline

if TYPE_CHECKING:
    from runnable import Pipeline

# Relative: an Argo workflow uses the same path in its image.
PARAMETERS = os.path.relpath(Path(__file__).with_name("parameters.yaml"))


def main() -> Pipeline:
    # Imported here, so that a wrong parameter is reported before Runnable prints anything.
    from runnable import Catalog, Pipeline, PythonTask, metric

    pipeline = Pipeline(
        name="paceline",
        steps=[
            PythonTask(
                name="prepare_data",
                function=steps.prepare_data,
                returns=["training_request"],
                catalog=Catalog(put=steps.catalogued("dataset_info.json")),
            ),
            PythonTask(
                name="train",
                function=steps.train,
                catalog=Catalog(put=steps.catalogued("*_output.log", steps.CHECKPOINTS)),
                overrides={"argo": "train"},
            ),
            PythonTask(
                name="aggregate",
                function=steps.aggregate,
                returns=[metric("avg_final_accuracy"), metric("total_training_time")],
                catalog=Catalog(put=steps.catalogued(steps.RESULTS, "metrics_rank_*.json", "metrics.*")),
            ),
            PythonTask(
                name="evaluate",
                function=steps.evaluate,
                returns=[metric("test_accuracy")],
                catalog=Catalog(put=steps.catalogued("evaluation.json")),
            ),
            PythonTask(
                name="report",
                function=steps.report,
                catalog=Catalog(put=steps.catalogued("report.*", "config.yaml", "environment.json")),
            ),
        ],
    )
    pipeline.execute(parameters_file=PARAMETERS)
    return pipeline


if __name__ == "__main__":
    sys.exit(run_pipeline(main, script=__file__, parameters_file=PARAMETERS))
