"""The live card of a training step (progress, curves, nodes, uploaded checkpoints), and the card of a test.

Cards consist of Metaflow's own components, so a card is one file that needs no network. During training only the values
of a card change.
"""

from __future__ import annotations

import threading
from typing import Any

from metaflow.cards import Markdown, ProgressBar, VegaChart

from paceline.integrations.metaflow.node import Node
from paceline.metrics.recorder import Row, read_rows

_POLL_S = 2.0
_MOST_POINTS = 500
_MOST_CLASSES = 20
_COLOURS = {  # distinguishable with colour blindness
    "domain": ["training", "validation", "test"],
    "range": ["#0072b2", "#d55e00", "#009e73"],
}


class TrainingCard:
    """The nodes. On a node with its own folder also metrics, updated by a thread."""

    def __init__(self, card: Any, node: Node) -> None:
        self._card = card
        self._node = node
        self._over = threading.Event()
        self._shown: tuple[int, int] | None = None
        self._head = Markdown(self._headline({}))
        self._progress = ProgressBar(max=100, label="trained", unit="%")
        self._last_step = 0
        self._loss = VegaChart(line_chart("loss", []))
        self._accuracy = VegaChart(line_chart("accuracy", []))
        self._rate = VegaChart(line_chart("learning rate", []))
        self._lineage = Markdown(self._lineage_table())
        self._thread = threading.Thread(target=self._run, name="card", daemon=True)

    def start(self) -> None:
        self._card.extend([self._head, Markdown("## Nodes"), Markdown(layout_table(self._node))])
        if self._node.owns_folder:  # the card of another node is drawn once, at the end
            self._card.refresh()
            self._thread.start()

    def finish(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._node.owns_folder:
            self._update()

    def _run(self) -> None:
        while not self._over.wait(_POLL_S):
            self._update()

    def _update(self) -> None:
        rows = read_rows(self._node.folder.metrics_jsonl)
        shown = (len(rows), len(self._node.datastore.history))
        status = self._node.folder.read_status()
        if shown == self._shown or not status:
            return
        if self._shown is None:
            self._card.extend([Markdown("## Curves"), self._progress, self._loss, self._accuracy, self._rate])
            self._card.extend([Markdown("## Checkpoints"), self._lineage])
        self._shown = shown
        self._head.update(self._headline(status))
        step = max((row["step"] for row in rows), default=0)
        self._last_step = int(status.get("last_step") or self._last_step)
        last = max(step, self._last_step, 1)
        self._progress.update(round(100 * step / last), f"step {step} of {last}")
        self._loss.update(line_chart("loss", points_of(rows, "loss")))
        self._accuracy.update(line_chart("accuracy", points_of(rows, "accuracy")))
        self._rate.update(line_chart("learning rate", points_of(rows, "lr")))
        self._lineage.update(self._lineage_table())
        self._card.refresh()

    def _headline(self, status: dict[str, Any]) -> str:
        request = self._node.request
        where = f"node {self._node.own} of {len(self._node.start.nodes)}, attempt {self._node.attempt + 1}"
        title = f"# {request.name}: {request.about['model_name']} on {request.about['dataset']}"
        lines = [title, f"{where}. {self._node.plan.origin}."]
        if status:
            reason = f" ({status['reason']})" if status.get("reason") else ""
            lines.append(f"**{status.get('status', '')}**{reason}, step {status.get('step', 0)}")
        return "\n\n".join(lines)

    def _lineage_table(self) -> str:
        lines = ["| step | epoch | validation loss | accuracy | | name |", "|---|---|---|---|---|---|"]
        for upload in self._node.datastore.history:
            marks = ", ".join(name for name, key in (("best", "is_best"), ("latest", "latest")) if upload[key])
            loss, accuracy = upload["val_loss"], upload["val_acc"]
            numbers = [f"{loss:.4f}" if loss is not None else "", f"{accuracy:.2%}" if accuracy is not None else ""]
            name = upload["key"].rpartition("/")[2]
            lines.append(f"| {upload['step']} | {upload['epoch']} | {' | '.join(numbers)} | {marks} | `{name}` |")
        return "\n".join([f"{self._node.plan.origin}. Uploaded to the datastore since:", "", *lines])


def fill_test_card(card: Any, title: str, test: dict[str, Any]) -> None:
    """Accuracy and loss, the classes with the lowest accuracy first, and the confusion matrix."""
    accuracy = "" if test["test_accuracy"] is None else f"**{test['test_accuracy']:.2%}** of "
    metrics = "".join(f", {name} {value:.4g}" for name, value in test.get("test_metrics", {}).items())
    figures = f"{accuracy}{test['samples']:,} samples, loss {test['test_loss']:.4f}{metrics}"
    title_text = f"# {title}\n\n{figures}, step {test['step']}"
    if not test["confusion_matrix"]:  # a task without classes that exclude each other
        card.append(Markdown(title_text))
        return
    card.extend([Markdown(title_text), Markdown("## Classes"), Markdown(class_table(test))])
    card.append(VegaChart(confusion_chart(test)))


def class_table(test: dict[str, Any]) -> str:
    lines = ["| class | accuracy |", "|---|---|"]
    accuracies = sorted(test["class_accuracy"].items(), key=lambda entry: (entry[1] is not None, entry[1]))
    for name, accuracy in accuracies[:_MOST_CLASSES]:
        lines.append(f"| {name} | {'no samples' if accuracy is None else f'{accuracy:.2%}'} |")
    return "\n".join(lines)


def confusion_chart(test: dict[str, Any]) -> dict[str, Any]:
    """A Vega-Lite table of counts: rows are the true classes. Only counts above zero: a card is one file."""
    names = list(test["class_accuracy"])
    points = [
        {"true": names[row], "predicted": names[column], "samples": count}
        for row, counts in enumerate(test["confusion_matrix"])
        for column, count in enumerate(counts)
        if count
    ]
    axes = {name: {"field": name, "type": "nominal", "sort": None, "title": name} for name in ("true", "predicted")}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "data": {"values": points},
        "mark": {"type": "rect", "tooltip": True},
        "encoding": {
            "x": axes["predicted"],
            "y": axes["true"],
            "color": {"field": "samples", "type": "quantitative", "scale": {"scheme": "blues"}},
        },
    }


def layout_table(node: Node) -> str:
    lines = ["| node | role | host | cores | ranks | |", "|---|---|---|---|---|---|"]
    ranks = node.request.processes_per_node
    for other in node.start.nodes:
        role = "main" if other.node == 0 else "worker"
        mine = "this card" if other.node == node.own else ""
        lines.append(f"| {other.node} | {role} | {other.host} | {other.cores} | {ranks} | {mine} |")
    return "\n".join(lines)


def points_of(rows: list[Row], name: str) -> list[dict[str, Any]]:
    """Steps, and the results of each epoch. Limited in number, since each refresh sends the whole card."""
    steps = [row for row in rows if row["kind"] == "step"]
    every = max(1, len(steps) // _MOST_POINTS)
    kept = [row for number, row in enumerate(steps) if number % every == 0]
    kept += [row for row in rows if row["kind"] == "epoch" and row["phase"] != "train"]
    words = {"step": "training", "val": "validation", "test": "test"}
    return [
        {"step": row["step"], "value": row[name], "of": words[row.get("phase", "step")]}
        for row in kept
        if row.get(name) is not None
    ]


def line_chart(title: str, points: list[dict[str, Any]]) -> dict[str, Any]:
    """A Vega-Lite line over steps, one per kind of measurement."""
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "height": 220,
        "data": {"values": points},
        "mark": {"type": "line", "point": len(points) < 60, "tooltip": True},
        "encoding": {
            "x": {"field": "step", "type": "quantitative", "title": "step"},
            "y": {"field": "value", "type": "quantitative", "title": title, "scale": {"zero": False}},
            "color": {"field": "of", "type": "nominal", "title": None, "scale": _COLOURS},
        },
    }
