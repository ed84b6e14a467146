"""The settings of what a run learns and how: model, training, optimizer, loss. Groups of `schema.Config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from paceline.settings.declare import Arg, Count, Factor, Fraction, NonNegative, Positive, Range, Share


@dataclass(frozen=True)
class ModelConfig:
    model_name: str = "cnn"
    """mlp, cnn, sprint, sprint-wide, vgg11/16/19, resnet18/34/50, vit-ti16, vit-s16, vit-b16, timm:NAME,
    torchvision:NAME, FILE.py:FUNCTION or package.module:FUNCTION."""

    weights: str = "none"
    """Initial weights: none, imagenet, timm:NAME or torchvision:NAME (of a model with the same parameters), or a
    .safetensors/.pth file. A head for other classes is left out, and position embeddings are resized."""

    hidden_size: Annotated[int, Range(low=1, high=2**16)] = 256
    """Width of the mlp's hidden layers."""

    dropout: Fraction = 0.0
    """Dropout in the classifier of mlp, cnn and vgg, and in the blocks of vit."""

    model_args: Annotated[tuple[str, ...], Arg(shown="KEY=VALUE", is_mapping=True)] = ()
    """Arguments for the model: patch_size=8 drop_path=0.1. Numbers, true, false, none, and JSON lists are converted.
    Separate several with spaces."""


@dataclass(frozen=True)
class TrainConfig:
    epochs: Positive = 10
    """Passes over the training set."""

    max_steps: Count = 0
    """Stop after this many steps of the run; 0 for no limit."""

    global_batch_size: Positive = 256
    """Samples per step over all ranks. It does not depend on the number of ranks."""

    accumulate: Positive = 1
    """Microbatches per rank and step. The global batch does not change."""

    test_batch_size: Positive = 1024
    """Samples per rank and forward pass in evaluation."""

    test_views: Literal[1, 2, 6] = 1
    """Views of an image whose predictions are averaged in evaluation. 2: also flipped. 6: both also shifted."""

    loss: str = ""
    """cross-entropy, bce, focal, mse, l1, huber, or FILE.py:FUNCTION of (logits, labels) that returns the mean loss or
    one per sample. Empty: cross-entropy (multi-label: bce, regression: mse)."""

    metrics: tuple[str, ...] = ()
    """FILE.py:FUNCTION of (logits, labels) that returns a value per sample, averaged in each evaluation. Separate
    several with spaces."""

    stop_early: Count = 0
    """Finish the run after this many epochs in a row without a better validation; 0: never."""

    seed: Annotated[int, Range(low=0, high=2**31 - 1)] = 42
    """Seed of initial weights, sample order, augmentation and generated data."""

    deterministic: bool = False
    """Use only deterministic kernels (slower on GPUs)."""

    amp: bool = True
    """Mixed precision on GPUs."""

    amp_dtype: Literal["auto", "bf16", "fp16"] = "auto"
    """auto: bf16 if the GPU supports it, otherwise fp16; full precision on CPUs."""

    compile: Literal["auto", "always", "never"] = "auto"
    """torch.compile on GPUs. auto: if the run is long enough to gain from it. never: also do not record steps as CUDA
    graphs."""

    activation_checkpointing: bool = False
    """Keep only the inputs of a model's blocks, and compute the rest again in the backward pass: less memory, longer
    steps."""


@dataclass(frozen=True)
class OptimConfig:
    optimizer: Literal["sgd", "nesterov", "adam", "adamw", "lamb", "muon"] = "sgd"
    """nesterov is sgd with Nesterov momentum; lamb is adamw with a step per layer that follows the size of its weights;
    muon makes the updates of hidden weights orthogonal."""

    base_lr: Factor = 0.05
    """Learning rate for a global batch of 256, scaled linearly to the actual batch (muon: not scaled)."""

    momentum: Fraction = 0.9
    """Momentum of sgd, nesterov and muon."""

    weight_decay: NonNegative = 5e-4
    """Weight decay (decoupled under adamw and lamb)."""

    decay_norms_and_biases: bool = True
    """Apply weight decay also to norms, biases, and position and class embeddings."""

    layer_decay: Share = 1.0
    """Multiply the learning rate by this once for each layer between a parameter and the head; 1: the same rate for
    all layers."""

    head_lr_factor: Factor = 1.0
    """Multiply the learning rate of the head by this."""

    freeze: tuple[str, ...] = ()
    """Do not train parameters with these names: patterns such as "layer1" or "blocks.[0-5].*". Separate several with
    spaces."""

    unfreeze_at: Count = 0
    """Train the frozen parameters from this epoch on, counted from 1; 0: never."""

    schedule: Literal["constant", "linear", "cosine", "onecycle", "steps"] = "cosine"
    """Learning-rate schedule over the whole run. steps: multiply by lr-step-factor after each epoch of lr-steps."""

    warmup_epochs: NonNegative = 0.0
    """Epochs of linear warm-up before the schedule (onecycle: its rising part)."""

    warmup_start_lr: NonNegative = 0.0
    """Learning rate at which the warm-up starts, scaled like base-lr; 0: at the first step's share of the peak
    (onecycle: a 25th of it)."""

    min_lr: NonNegative = 0.0
    """Learning rate at which the schedule ends, scaled like base-lr."""

    cooldown_epochs: NonNegative = 0.0
    """Last epochs of the run that keep the rate at which the schedule has ended."""

    lr_steps: Annotated[tuple[int, ...], Range(low=1)] = ()
    """Epochs after which schedule steps multiplies the rate, in increasing order."""

    lr_step_factor: Share = 0.1
    """The factor of schedule steps."""

    clip_norm: NonNegative = 0.0
    """Clip the global gradient norm to this; 0 for no clipping."""

    clip_value: NonNegative = 0.0
    """Clip each element of the gradients to at most this; 0 for no clipping."""

    clip_agc: NonNegative = 0.0
    """Adaptive gradient clipping: clip the gradient of each unit (row of a weight) to this share of the unit's own
    norm, except in the head; 0 for no clipping."""

    label_smoothing: Fraction = 0.0
    """Label smoothing of the training loss."""

    ema_decay: Fraction = 0.0
    """Keep an exponential moving average of the weights and evaluate with it; 0 for none."""

    ema_warmup_epochs: NonNegative = 0.0
    """Start the moving average after this many epochs; until then it equals the weights."""


@dataclass(frozen=True)
class ObjectiveConfig:
    bce_threshold: Annotated[float, Range(low=0.0, high=1.0, open_high=True)] = 0.0
    """With loss bce: soft targets above this count as 1, the others as 0; 0: soft targets stay as they are."""

    focal_gamma: Annotated[float, Range(low=0.0, high=10.0)] = 2.0
    """With loss focal: how much samples that are already recognised count less; 0: not at all."""

    class_weights: tuple[str, ...] = ()
    """A weight of each class in the training loss: numbers in the order of the classes, balanced (by how rare a class
    is), or a file of numbers."""

    best_by: str = ""
    """The validation metric that selects the best checkpoint: loss, accuracy, balanced_accuracy, f1, top5, map, mae,
    rmse, or min:NAME or max:NAME of --metrics. Empty: accuracy (multi-label: map, regression: mae)."""

    teacher: Annotated[str, Arg(completes="run")] = ""
    """Distillation: a run, a checkpoint or timm:NAME whose outputs are learned too."""

    distill: Literal["soft", "hard"] = "soft"
    """soft: learn the probabilities of the teacher. hard: learn its most likely class."""

    distill_temperature: Annotated[float, Range(low=0.0, open_low=True, high=100.0)] = 1.0
    """With distill soft: divides the outputs of teacher and model before they become probabilities."""

    distill_weight: Annotated[float, Range(low=0.0, high=1.0, open_low=True)] = 0.5
    """Share of the teacher's part in the loss; the labels have the rest."""

    teacher_sha256: str = ""
    """Hash of the teacher's weights. The run fills it in and refuses a teacher with another one."""
