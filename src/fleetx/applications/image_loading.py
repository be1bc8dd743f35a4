"""Make the loaders of an image model: from a folder or a .tar, of classes or with lists, a data set, or built-in data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

from ..config.kinds import boolean, choice
from ..data import hub
from ..data.images.builtin import BUILTIN, builtin_images
from ..data.images.from_dataset import image_dataset_source
from ..data.images.from_paths import image_folder_source, image_list_source
from ..data.images.list_source import ImageListSource
from ..data.loader import Loader
from ..data.source import Source
from ..errors import ConfigError, DataError
from .loader_options import OF_LOADER, of_loader, pick, refuse_unknown, require_place

Path: TypeAlias = str | os.PathLike[str]
Data: TypeAlias = str | os.PathLike[str] | Any
"""A folder or .tar, the name of built-in data, or a data set of Hugging Face's `datasets`."""
OnBadSample: TypeAlias = Literal["raise", "skip"] | float

SKIP_SHARE = 0.01
"""Share of a pass's samples that `on_bad_sample="skip"` allows to be unreadable."""


class ImageOptions(TypedDict, total=False):
    """Keywords of every image loader."""

    seed: int
    """Seed of order and augmentation."""
    workers: int
    """Processes that read for this rank; by default its part of the cores. The data are the same with any number."""
    drop_last: bool
    """Leave out the last, smaller batch; True by default in training."""
    on_bad_sample: OnBadSample
    """Reaction to an unreadable image: "raise", or "skip" up to 1 % of a pass, or up to another share, such as 0.05."""
    flip: bool
    """Mirror half of the images in training."""
    mean: Sequence[float]
    """Means of red, green and blue, on a scale of 0 to 1; by default ImageNet's."""
    std: Sequence[float]
    """Standard deviations of red, green and blue, on a scale of 0 to 1; by default ImageNet's."""
    max_pixels: int
    """Limit on width x height; larger images are refused before they are decoded."""


OF_FILES = ("seed", "flip", "mean", "std", "max_pixels")
OF_BUILTIN = ("seed",)


class LoadsImages:
    """Mixin of image models: loaders of batches (images, labels) on `fleet.device()`, at the model's own image size."""

    num_classes: int
    image_size: int
    channels_last: bool
    classes: tuple[str, ...] | None = None
    """Names of the classes in the last training data, by number, which evaluation data get too; None where they have no names."""

    def load_imagenet_from_file(
        self,
        filelist: Path,
        batch_size: int = 32,
        phase: str = "train",
        shuffle: bool | None = None,
        *,
        root: Path | None = None,
        **options: Unpack[ImageOptions],
    ) -> Loader:
        """Load a list of `relative/path label`; images beside it, under `train/` beside it, or in `root`, a folder or .tar."""
        train = choice("train", "val", "test").check("phase", phase) == "train"
        source = image_list_source(filelist, root, train=train, **self._about_files(options))
        return _loader(source, batch_size, train, shuffle, options)

    def get_train_dataloader(
        self, data: Data, batch_size: int = 32, shuffle: bool | None = None, **options: Unpack[ImageOptions]
    ) -> Loader:
        """Load training data: a folder or .tar with `train/CLASS/IMAGE` or `train.txt`; a data set; "digits", "fashion_mnist".

        A folder of such a name is written "./digits".
        """
        source = self._source(data, "train", options)
        loader = _loader(source, batch_size, True, shuffle, options)
        self.classes = source.entries.classes or None if isinstance(source, ImageListSource) else None
        return loader

    def get_val_dataloader(
        self, data: Data, batch_size: int = 32, shuffle: bool | None = None, **options: Unpack[ImageOptions]
    ) -> Loader:
        """Load evaluation data, of `val` or `validation`, or `test` where there is none: every sample once, not augmented."""
        return _loader(self._source(data, "val", options), batch_size, False, shuffle, options)

    def _source(self, data: Data, split: Literal["train", "val"], options: Mapping[str, Any]) -> Source:
        if hub.is_dataset(data):
            return image_dataset_source(data, split, **self._about_files(options), classes=self._classes_for(split))
        if not (isinstance(data, str) and data in BUILTIN):
            require_place(data, "a folder or a .tar of images, or a data set", BUILTIN)
            _refuse_list(data)
            return image_folder_source(data, split, **self._about_files(options), classes=self._classes_for(split))
        refuse_unknown(options, (*OF_BUILTIN, *OF_LOADER, "on_bad_sample"), f'the built-in data "{data}"')
        source = builtin_images(
            data,
            "train" if split == "train" else "test",
            image_size=self.image_size,
            channels_last=self.channels_last,
            **pick(options, OF_BUILTIN),
        )
        if source.num_classes > self.num_classes:
            raise ConfigError(
                f'"{data}" has {source.num_classes} classes, the model {self.num_classes}. '
                f"Write {type(self).__name__}(num_classes={source.num_classes}, ...)."
            )
        return source

    def _classes_for(self, split: str) -> tuple[str, ...] | None:
        return None if split == "train" else self.classes

    def _about_files(self, options: Mapping[str, Any]) -> dict[str, Any]:
        share = bad_share(options.get("on_bad_sample", "raise"))
        refuse_unknown(options, (*OF_FILES, *OF_LOADER, "on_bad_sample"), "a loader of images")
        return pick(options, OF_FILES) | {
            "num_classes": self.num_classes,
            "image_size": self.image_size,
            "channels_last": self.channels_last,
            "on_bad_sample": "skip" if share else "raise",
        }


def bad_share(on_bad_sample: OnBadSample) -> float:
    """Return the allowed share of unreadable samples: 0, the default of "skip", or the one given."""
    if on_bad_sample == "raise":
        return 0.0
    if on_bad_sample == "skip":
        return SKIP_SHARE
    if isinstance(on_bad_sample, float) and 0.0 < on_bad_sample < 1.0:
        return on_bad_sample
    raise ConfigError(
        f'on_bad_sample is {on_bad_sample!r}; it must be "raise", "skip" (up to {SKIP_SHARE:.0%} of the samples of a pass), '
        "or another share between 0 and 1, such as 0.05."
    )


def _refuse_list(data: Path) -> None:
    if os.path.isfile(data) and str(data).endswith(".txt"):
        raise DataError(f"{data} is a file, not a folder or a .tar. If it is a list, write model.load_imagenet_from_file(...).")


def _loader(source: Source, batch_size: int, train: bool, shuffle: bool | None, options: Mapping[str, Any]) -> Loader:
    shuffle = train if shuffle is None else boolean().check("shuffle", shuffle)
    share = bad_share(options.get("on_bad_sample", "raise"))
    return Loader(source, batch_size, shuffle=shuffle, train=train, max_bad_share=share, **of_loader(options))
