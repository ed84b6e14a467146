"""The settings of a run: frozen dataclasses whose fields are the flags and the recipe keys.

`declare.py` says how fields are declared. Names are unique over all groups. `rules.py` has the rules between fields.
Imports no torch: `--help` must be fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from paceline.settings.declare import (
    Alpha,
    Arg,
    Count,
    FieldSpec,
    NonNegative,
    Positive,
    Probability,
    Range,
    Seconds,
    fields_of,
)
from paceline.settings.learning import ModelConfig as ModelConfig
from paceline.settings.learning import ObjectiveConfig
from paceline.settings.learning import OptimConfig as OptimConfig
from paceline.settings.learning import TrainConfig as TrainConfig
from paceline.settings.values import find_in

SHARDED = ("fsdp", "hsdp")  # strategies under which a rank holds a part of each parameter


@dataclass(frozen=True)
class DataConfig:
    dataset: str = "shapes"
    """shapes, synthetic, cifar10, cifar100, fashion-mnist, folder (of pictures, or packed by paceline data pack), csv
    (paths and labels in data-dir), arrays (that paceline.train wrote from Python), or FILE.py:FUNCTION."""

    task: Literal["single-label", "multi-label", "regression"] = "single-label"
    """What is learned: one class per sample, any number of classes, or numbers."""

    data_dir: str = "data"
    """The folder of the data sets, also for downloads. Of the data set folder: also an archive, or the URL of archives
    in a store (s3://BUCKET/PATH)."""

    num_samples: Positive = 20_000
    """Training and validation samples to make (shapes, synthetic)."""

    input_size: str = "784"
    """Shape of a synthetic sample: 784 for vectors, 3x32x32 for images."""

    num_classes: Annotated[int, Range(low=2, high=4096)] = 10
    """Classes of the synthetic data set."""

    train_split: Annotated[float, Range(low=0.0, high=1.0, open_low=True)] = 0.9
    """Fraction of the training set that is used for training; the rest is the validation set. 1: no validation. Not
    for data that has a validation set of its own: a val folder, or a function that returns one."""

    folds: Annotated[int, Range(low=0, high=1000)] = 0
    """Cross-validation: cut the training set into this many equal parts by the seed. A run validates with one of them
    (fold) and trains on the others, instead of train-split. 0: no cross-validation."""

    fold: Annotated[int, Range(low=0, high=1000)] = 0
    """The part to validate with, from 1 to folds."""

    augment: Literal["none", "light", "gentle", "lively", "imagenet", "resized-crop"] = "light"
    """light: shifted crop and flip. gentle: half the shift, mirrored borders, and a flip that alternates between
    epochs. lively: like gentle, with the whole shift. imagenet: resize, random crop to image-size, flip. resized-crop:
    a random part of the picture, resized to image-size, and a flip (RandomResizedCrop)."""

    image_size: Annotated[int, Range(low=8, high=2048)] = 224
    """Side of the model's input under the imagenet and resized-crop pipelines and for folders."""

    resolution_schedule: Annotated[str, Arg("EPOCH:SIZE,...")] = ""
    """Sides of the training inputs by epoch, counted from 0: 0:128,10:160,16:192. Empty: always image-size. Under the
    imagenet and resized-crop pipelines."""

    test_size: Annotated[int, Range(low=0, high=2048)] = 0
    """Side of the inputs in validation, test and prediction under these pipelines; 0: image-size."""

    crop_scale: Annotated[float, Range(low=0.0, high=1.0, open_low=True)] = 0.08
    """The smallest share of a picture's area that resized-crop takes."""

    crop_ratio: Annotated[float, Range(low=1.0, high=10.0)] = 4 / 3
    """The largest ratio of the sides of a resized-crop."""

    crop_from: Literal["square", "picture"] = "square"
    """What resized-crop takes its part from: the central square of a picture, or the whole picture (RandomResizedCrop).
    picture needs encoded pictures (folder, archive, csv, packed as encoded), and decodes only what a crop needs."""

    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How resized-crop resizes, always with antialiasing."""

    flip: bool = True
    """Flip images left to right at random; turn off for letters and digits."""

    cutout: Count = 0
    """Side of a square that is erased at a random place in each training image; 0 for none."""

    vertical_flip: bool = False
    """Also flip training images upside down at random."""

    policy: Literal["none", "randaugment", "trivial", "three"] = "none"
    """Random operations on training images: RandAugment, TrivialAugment, or three-augment (grey, solarize or blur)."""

    policy_ops: Annotated[int, Range(low=1, high=8)] = 2
    """Operations per image under randaugment."""

    policy_magnitude: Annotated[float, Range(low=0.0, high=30.0)] = 9.0
    """Strength of the operations under randaugment."""

    policy_std: NonNegative = 0.0
    """Standard deviation of the strength under randaugment; 0: always the same."""

    color_jitter: NonNegative = 0.0
    """Change brightness, contrast and saturation by random factors from 1 - x to 1 + x; 0 for none."""

    hue_jitter: Annotated[float, Range(low=0.0, high=0.5)] = 0.0
    """Turn the hue by up to this part of the colour circle; 0 for none."""

    grayscale: Probability = 0.0
    """Share of the training images that become grey."""

    blur: Probability = 0.0
    """Share of the training images that are blurred."""

    solarize: Probability = 0.0
    """Share of the training images whose bright values are inverted."""

    erase: Probability = 0.0
    """Share of the training images in which a random rectangle is erased."""

    mixup_alpha: Alpha = 0.0
    """Mix pairs of training images and their labels (mixup), with weights from Beta(alpha, alpha); 0 for none."""

    cutmix_alpha: Alpha = 0.0
    """Paste a box of another training image, and mix the labels by its area (CutMix); 0 for none."""

    cutmix_share: Probability = 0.5
    """Share of the pairs that use CutMix, if mixup is on too."""

    mix_epochs: Count = 0
    """Mix in the first N epochs only; 0: in all."""

    sampling: Literal["uniform", "balanced", "weighted"] = "uniform"
    """uniform: every sample once per epoch. balanced: every class equally often. weighted: by the weights of the
    samples (a weight column, or a third array of a data set function), with repetition."""

    epoch_samples: Count = 0
    """Samples per epoch; 0: as many as there are in the training set."""
    repeat_augment: Annotated[int, Range(low=1, high=64)] = 1
    """How often a sample is in a global batch, each time augmented differently (repeated augmentation). An epoch has as
    many steps as without, and takes 1/N of the samples."""

    keep_share: Annotated[float, Range(low=0.0, high=1.0, open_low=True)] = 1.0
    """Share of the training samples that an epoch takes: those with the highest loss under keep-by, and some others."""

    keep_by: Annotated[str, Arg(completes="run")] = ""
    """With keep-share: a run or checkpoint of a small model (a proxy) on the same data. It scores each training sample
    once, by its loss without augmentation."""

    keep_random: Probability = 0.25
    """With keep-share: share of an epoch's samples that are others than the hardest. Epochs take these in turn, so that
    every sample is trained on."""

    keep_by_sha256: str = ""
    """Hash of the proxy's weights. The run fills it in and refuses a proxy with another one."""

    exclude: Annotated[str, Arg("SAMPLES", completes="file")] = ""
    """Training samples to leave out: numbers such as 3,17,20-29, or a text file with them. Another sample takes the
    place of each in the order, so all steps before its first one stay the same. For uniform sampling."""

    relabel: Annotated[str, Arg("FILE", completes="file")] = ""
    """Other labels for some training samples: a file with SAMPLE,LABEL lines, or 3=cat,17=dog. For uniform sampling
    and the task single-label."""

    unreadable: Count = 0
    """How many pictures of a folder may be unreadable; each is replaced by a grey one and named in the log."""

    decoder: Literal["pillow", "turbo"] = "pillow"
    """What decodes JPEG pictures. turbo: libjpeg-turbo by simplejpeg, which is faster (pip install 'paceline[turbo]').
    A run keeps its decoder: central squares differ."""

    num_workers: Annotated[int, Range(low=0, high=256), Arg(aliases=("workers",))] = 2
    """Threads per rank that read image files (data sets that fit in memory need none)."""

    cache_dir: str = ""
    """The folder of indexes of archives, and of copies of data files from stores and of parquet files. All ranks and
    runs of a node can share it. Empty: the cache of Paceline (PACELINE_CACHE)."""

    cache_gb: Annotated[float, Range(low=0.0, high=1e6)] = 100.0
    """Most gigabytes of these copies on each node."""


@dataclass(frozen=True)
class ParallelConfig:
    strategy: Annotated[Literal["auto", "single", "ddp", "fsdp", "hsdp"], Arg(aliases=("method",))] = "auto"
    """auto: single on one process, ddp on more. fsdp shards weights, gradients and optimizer over all ranks. hsdp
    shards them over the ranks of a node, and every node has a copy."""

    processes: Annotated[str, Arg(aliases=("world-size",))] = "0"
    """Local processes to start; 0: one per GPU, or without GPUs one per core, at most 4. MIN:MAX lets a restart use
    fewer or more."""

    lanes: Count = 0
    """Equal parts of the global batch; 0 for one per rank."""

    exact: bool = False
    """The same bits on 1, 2, 4, ... ranks: each lane runs separately, and sums form one fixed tree."""

    sync_bn: bool = False
    """BatchNorm statistics over the whole global batch instead of each rank's part."""

    cpu_offload: bool = False
    """Keep sharded weights and optimizer state in CPU memory (fsdp, hsdp)."""

    fsdp_wrap: Literal["blocks", "layers", "model"] = "blocks"
    """The unit that is gathered at once (fsdp, hsdp): a block, a single layer, or the whole model."""

    reshard_after_forward: bool = True
    """Drop gathered weights after the forward pass and gather them again for the backward pass (fsdp, hsdp). Without it
    they stay: less communication, more memory."""

    bucket_cap_mb: Count = 0
    """MB of gradients that ddp sends at once; 0: torch's default of 25. With a size, ranks of one CPU node use ddp's
    buckets instead of shared memory."""

    exchange_dtype: Literal["auto", "bf16"] = "auto"
    """Type of the gradients that ranks send. auto: float32. bf16: half as many bytes, and sums of fewer digits. Ranks
    of one CPU node then use ddp's buckets instead of shared memory."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is a GPU."""

    ranks_per_gpu: Annotated[int, Range(low=1, high=64)] = 1
    """Ranks that share a GPU: rehearses a run on several GPUs with fewer. They exchange through gloo, and steps are not
    recorded, so it is slow."""

    omp_num_threads: Annotated[int, Range(low=0, high=1024)] = 0
    """CPU threads per rank; 0: cores divided by the ranks of this node."""


@dataclass(frozen=True)
class RunConfig:
    output_dir: str = ""
    """The run folder, or s3://BUCKET/RUN (any fsspec store) to mirror it to; empty: runs/<recipe>-<time>."""

    resume: Annotated[str, Arg(completes="run")] = ""
    """auto: continue the newest run of this recipe (or the one in output-dir). Or the path or URL of a run or
    checkpoint."""

    load_policy: Literal["fresh", "eager", "none"] = "fresh"
    """What --resume auto may use. fresh: this run's own checkpoints. eager: otherwise also those of any earlier run of
    the recipe, in a new folder. none: nothing."""

    best_is_latest: bool = False
    """Resume from the best checkpoint instead of the newest."""

    start_over_if_damaged: bool = False
    """Start at step 0 if every checkpoint of the run is damaged; otherwise such a run ends with exit code 4."""

    init_from: Annotated[str, Arg(completes="run")] = ""
    """Start a new run from the weights of a run, checkpoint or file, matched by name and shape. Replaces weights."""

    accept_new_data: bool = False
    """Continue although the data differs from the checkpoint's. Samples that were trained on stay out of validation."""

    keep_every_epochs: Count = 0
    """Also keep the checkpoint of every N-th epoch permanently; 0 for none."""

    save_epochs: Positive = 1
    """Save after every N-th epoch, after the last, and after each best one so far."""

    save_steps: Count = 0
    """Also save every N steps; 0: only after epochs."""

    keep_last: Positive = 2
    """How many of the newest checkpoints to keep."""

    keep_best: Positive = 1
    """How many of the best checkpoints to keep."""

    async_save: bool = True
    """Write checkpoints in the background. The loop waits only for the copy from the device."""

    log_frequency: Annotated[int, Range(low=1), Arg(aliases=("print-every",))] = 10
    """Steps between two logged steps."""

    metric_lines: bool = False
    """Print one line per epoch for scripts: [METRIC] epoch= time= val_loss= acc= peak_mem=."""

    track: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ("tensorboard",)
    """Also write metrics to these trackers (mlflow and wandb need their extra; both offline)."""

    rehearse: bool = False
    """Test train, save, resume and evaluate with two steps, and print a verdict, in seconds."""

    profile: bool = False
    """Record about ten steps on every rank into RUN/profile: traces for ui.perfetto.dev, and the most expensive
    operators."""


@dataclass(frozen=True)
class GuardConfig:
    max_restarts: Count = 3
    """How often a run is restarted from its newest checkpoint after a crash or a hang."""

    hang_timeout_s: Seconds = 0.0
    """Seconds without progress after which the ranks' stacks are written and the attempt ends; 0: computed
    from the run's own step times."""

    stop_signals: tuple[Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"], ...] = ("SIGTERM", "SIGUSR1", "SIGUSR2")
    """Signals after which the run saves at the next step and ends with exit code 75."""

    notice_s: Seconds = 0.0
    """Seconds between the scheduler's stop signal and its kill. Training continues while there is time left to save.
    0: stop at the next step."""

    on_nonfinite: Literal["stop", "rollback"] = "stop"
    """When a loss or gradient is not finite: stop, or go back to the last checkpoint and skip the batch."""

    skip_nonfinite: Count = 0
    """Skip up to this many updates with a loss or gradient that is not finite."""

    spike_factor: Annotated[float, Range(low=0.0)] = 0.0
    """Treat a loss this many times the median of the last 50 steps like one that is not finite; 0: never."""

    auto_microbatch: bool = False
    """When a rank runs out of memory, halve the microbatch on all ranks (to the next equal part that is small enough).
    The global batch does not change."""

    audit: Annotated[str, Arg("SHARE")] = ""
    """Recompute gradients of each rank on another one in this share of the steps (1%), and compare bits. A rank that
    computes wrong bits is named and left out. Needs exact. Empty: never."""

    inject: str = ""
    """Faults to inject: "kill rank=1 step=50; hang rank=0 step=80" (list in docs/reliability.md)."""


@dataclass(frozen=True)
class Config:
    """Everything that defines a run."""

    data: DataConfig = field(default_factory=DataConfig)
    """The data."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Epochs, batches, precision and evaluation."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """Loss, best metric and teacher."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Processes and strategy."""
    run: RunConfig = field(default_factory=RunConfig)
    """Output, resume and logging."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """Failures and stops."""


def field_table() -> dict[str, FieldSpec]:
    """Every field by name, in the order of `--help`."""
    return fields_of(Config)


def find_field(key: str) -> FieldSpec | None:
    """The field of this recipe key, flag (without dashes) or alias."""
    return find_in(field_table(), key)


def flatten(config: Config) -> dict[str, Any]:
    """Every value of a config by field name, in the order of `--help`."""
    return {name: spec.value_in(config) for name, spec in field_table().items()}
