"""Train a vision model on several nodes that restart together if one is lost, then test the model.

    python flow.py run --cluster-size 2                                   # on this machine, no cloud
    python flow.py run --with kubernetes --cluster-size 4                 # the same on a cluster (or --with batch)
    python flow.py --environment=pypi run --with kubernetes ...           # Metaflow installs the packages

More: docs/guides/metaflow.md.
"""

import paceline.integrations.metaflow.needed  # noqa: F401, I001 - first: a clear error without Metaflow
from metaflow import FlowSpec, Parameter, card, checkpoint, current, model, parallel, retry, step

from paceline.integrations.metaflow.steps import CARD, TEST_CARD, checked, evaluate_model, packaged, training


@packaged
class PacelineFlow(FlowSpec):
    recipe = Parameter("recipe", default="shapes-cnn", help="a recipe that comes with paceline, or a YAML file")
    flags = Parameter("flags", default="", help='any flag of paceline train: "--optimizer adamw --save-steps 50"')
    cluster_size = Parameter("cluster-size", type=int, default=2, help="nodes")
    processes_per_node = Parameter("processes-per-node", type=int, default=1, help="ranks on each node: one per GPU")
    model_name = Parameter("model-name", type=str, default=None, help="a model of paceline, or any name of timm's")
    batch_size = Parameter("batch-size", type=int, default=None, help="samples per step over all nodes together")
    test_batch_size = Parameter("test-batch-size", type=int, default=None, help="samples per forward pass in tests")
    epochs = Parameter("epochs", type=int, default=None, help="passes over the training set")
    learning_rate = Parameter(
        "learning-rate", type=float, default=None, help="for a batch of 256; follows the batch size linearly"
    )
    train_from_scratch = Parameter(
        "train-from-scratch", type=int, default=None, help="1: no pretrained weights; 0: ImageNet's"
    )
    best_is_latest = Parameter(
        "best-is-latest", type=bool, default=False, help="resume from the best checkpoint, not the newest"
    )
    load_policy = Parameter(
        "load-policy",
        default="fresh",
        help="what a task may resume from: fresh: its own earlier attempts; eager: else an earlier run; none: nothing",
    )
    work_dir = Parameter("work-dir", default="", help="where nodes put the run folder; empty: a temporary folder")
    node_timeout_s = Parameter("node-timeout-s", type=float, default=600.0, help="seconds to wait for all nodes")

    @step
    def start(self):
        """Check all parameters before any training starts."""
        names = ("recipe", "flags", "cluster_size", "processes_per_node", "model_name", "batch_size")
        names += ("test_batch_size", "epochs", "learning_rate", "train_from_scratch", "best_is_latest")
        names += ("load_policy", "work_dir", "node_timeout_s")
        self.request = checked(**{name: getattr(self, name) for name in names})
        self.next(self.train, num_parallel=self.cluster_size)

    @card(type="blank", id=CARD, refresh_interval=5)
    @retry(times=4, minutes_between_retries=0)
    @model
    @checkpoint(load_policy="fresh", show_card=False)
    @parallel
    @step
    def train(self):
        """One node. A retry continues from the newest checkpoint, on any machine."""
        self.results = self.history = self.model = None
        with training(self.request) as trained:
            if trained is not None:  # the node of rank 0
                self.results, self.history = trained.results, trained.history
                self.model = current.model.save(trained.model, label=trained.label, metadata=trained.about)
        self.next(self.join)

    @step
    def join(self, inputs):
        first = next(node for node in inputs if node.model is not None)
        self.request, self.results = first.request, first.results
        self.history, self.model = first.history, first.model
        self.next(self.test_model)

    @card(type="blank", id=TEST_CARD)
    @model(load=["model"])
    @step
    def test_model(self):
        """Test again from the saved model only."""
        self.test = evaluate_model(current.model.loaded["model"])
        self.test_accuracy = self.test["test_accuracy"]
        print(f"test accuracy {self.test_accuracy:.2%} on {self.test['samples']:,} samples")
        self.next(self.end)

    @step
    def end(self):
        print(f"model: {self.model['key']}")
        print(f"test it again: python test_flow.py run --run {current.flow_name}/{current.run_id}")


if __name__ == "__main__":
    PacelineFlow()
