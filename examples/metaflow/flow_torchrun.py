"""The same training under Metaflow's own @torchrun, for clusters that already use it.

    python flow_torchrun.py --datastore s3 run --cluster-size 4
    python flow_torchrun.py --datastore s3 argo-workflows create

@torchrun needs a cluster and a cloud datastore. On a laptop use flow.py: it needs neither, and it ends all nodes at
once if one of them fails.
"""

import paceline.integrations.metaflow.needed  # noqa: F401, I001 - first: a clear error without Metaflow
from metaflow import FlowSpec, Parameter, checkpoint, current, kubernetes, model, retry, step, torchrun

from paceline.integrations.metaflow.steps import checked, evaluate_model, packaged
from paceline.integrations.metaflow.torchrun import training_by_torchrun

IMAGE = "paceline:0.1.0"  # an image in your registry that has paceline[metaflow]
RUNS = {"paceline-runs": "/runs"}  # a volume that all nodes can write to, and its mount path
PROCESSES_PER_NODE = 1  # one per GPU


@packaged
class PacelineTorchrunFlow(FlowSpec):
    recipe = Parameter("recipe", default="shapes-cnn", help="a recipe that comes with paceline, or a YAML file")
    flags = Parameter("flags", default="", help="any flag of paceline train")
    cluster_size = Parameter("cluster-size", type=int, default=2, help="nodes")

    @kubernetes(image=IMAGE)
    @step
    def start(self):
        names = ("recipe", "flags", "cluster_size")
        given = {name: getattr(self, name) for name in names}
        self.request = checked(**given, processes_per_node=PROCESSES_PER_NODE, work_dir=next(iter(RUNS.values())))
        self.next(self.train, num_parallel=self.cluster_size)

    @retry(times=4, minutes_between_retries=0)
    @model
    @checkpoint(load_policy="fresh", show_card=False)
    @kubernetes(image=IMAGE, cpu=4, memory=16000, shared_memory=4000, persistent_volume_claims=RUNS)  # and gpu=1
    @torchrun(all_nodes_started_timeout=3600, nproc_per_node=PROCESSES_PER_NODE)
    @step
    def train(self):
        self.results = self.history = self.model = None
        with training_by_torchrun(self.request) as trained:
            if trained is not None:  # the main node
                self.results, self.history = trained.results, trained.history
                self.model = current.model.save(trained.model, label=trained.label, metadata=trained.about)
        self.next(self.join)

    @kubernetes(image=IMAGE)
    @step
    def join(self, inputs):
        main = next(node for node in inputs if node.model is not None)
        self.results, self.history, self.model = main.results, main.history, main.model
        self.next(self.test_model)

    @model(load=["model"])
    @kubernetes(image=IMAGE)
    @step
    def test_model(self):
        self.test = evaluate_model(current.model.loaded["model"])
        self.test_accuracy = self.test["test_accuracy"]
        self.next(self.end)

    @kubernetes(image=IMAGE)
    @step
    def end(self):
        print(f"test accuracy {self.test_accuracy:.2%}")


if __name__ == "__main__":
    PacelineTorchrunFlow()
