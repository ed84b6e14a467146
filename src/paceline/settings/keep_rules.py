"""The rules of --keep-share, and how many samples it keeps."""

from __future__ import annotations

from paceline.errors import UserError
from paceline.settings.load import LoadedConfig
from paceline.settings.schema import DataConfig


def check_kept(loaded: LoadedConfig) -> None:
    data = loaded.config.data
    if data.keep_share == 1:
        # A run with `--keep-share 1`, for example in a sweep, is the one without it.
        unused = () if loaded.origin("keep_share") == "flag" else ("keep_by",)
        for name in (*unused, "keep_random", "keep_by_sha256"):
            if loaded.origin(name) == "flag":
                raise UserError(
                    f"{name} needs a keep_share below 1",
                    where=loaded.where(name),
                    hint=f"--keep-share 0.5 --keep-by RUN, or no --{name.replace('_', '-')}",
                )
        return
    if not data.keep_by:
        raise UserError(
            "keep_share needs a trained model that scores the samples",
            where=loaded.where("keep_share"),
            got=f"keep_share {data.keep_share:g} without keep_by",
            hint="--keep-by RUN, a run of a small model on the same data",
        )
    others = {"sampling": data.sampling != "uniform", "epoch_samples": data.epoch_samples > 0}
    for name, is_given in others.items():
        if is_given:
            raise UserError(
                f"keep_share and {name} both decide which samples an epoch takes",
                where=f"{loaded.where('keep_share')} and {loaded.where(name)}",
                hint=f"leave --keep-share or --{name.replace('_', '-')} out",
            )


def count_kept(data: DataConfig, num_train: int) -> tuple[int, int]:
    """How many samples of an epoch are the hardest ones, and how many are others."""
    kept = max(round(num_train * data.keep_share), 1)
    others = round(kept * data.keep_random)
    return kept - others, others


def epoch_length(data: DataConfig, num_train: int) -> int:
    """Samples of an epoch, of so many training samples."""
    return data.epoch_samples or sum(count_kept(data, num_train))
