"""Test a model that flow.py has saved on its test set. Only its name is needed.

python test_flow.py run --run PacelineFlow/1234
python test_flow.py run --model-key mf.models/models/artifacts/shapes_cnn_0123...
"""

import paceline.integrations.metaflow.needed  # noqa: F401, I001 - first: a clear error without Metaflow
from metaflow import FlowSpec, Parameter, card, current, model, step

from paceline.integrations.metaflow.steps import TEST_CARD, evaluate_model, find_model, packaged


@packaged
class PacelineTestFlow(FlowSpec):
    run_of_flow = Parameter("run", default="", help="the run that saved it: PacelineFlow/1234")
    model_key = Parameter("model-key", default="", help="or the model's key")
    flags = Parameter("flags", default="", help='flags of paceline evaluate: "--device cpu --data-dir /data"')

    @step
    def start(self):
        self.model = find_model(self.run_of_flow, self.model_key)
        self.next(self.test_model)

    @card(type="blank", id=TEST_CARD)
    @model(load=["model"])
    @step
    def test_model(self):
        self.about = current.model.loaded.info["model"]["metadata"]
        self.test = evaluate_model(current.model.loaded["model"], self.flags)
        self.test_accuracy = self.test["test_accuracy"]
        self.next(self.end)

    @step
    def end(self):
        print(f"{self.about['model_name']} on {self.about['dataset']}, weights of step {self.test['step']}:")
        print(f"test accuracy {self.test_accuracy:.2%} on {self.test['samples']:,} samples")


if __name__ == "__main__":
    PacelineTestFlow()
