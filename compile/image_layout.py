"""From a transformers image processor to the image section of `processing.json`."""

from typing import Any

from PIL import Image

from ..engines.errors import CheckpointError, SpecEyesError
from ..runtime.processing.config import Idefics3Config, ImageConfig, LlavaConfig, PixelConfig, Qwen2VLConfig


def describe_image(processor: Any, config: Any) -> ImageConfig:
    """The image section of `processing.json` from a transformers processor and the model's configuration.

    Raises CheckpointError where the two do not fit each other, or for a setting that no layout knows.
    """
    image = processor.image_processor
    expected = config.image_token_id
    found = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    if found != expected:
        raise CheckpointError(
            f"config.json: image_token_id is {expected}, but the tokenizer gives {processor.image_token!r} id {found}"
        )
    try:
        if config.model_type in ("idefics3", "smolvlm"):
            return _describe_idefics3(processor, image, config)
        if config.model_type == "llava":
            return _describe_llava(processor, image, config)
        return _describe_qwen2_vl(processor, image, config)
    except SpecEyesError as error:
        raise CheckpointError(f"{type(image).__name__}: {error}") from error


def describe_pixels(image: Any) -> PixelConfig:
    """Resampling, scale, mean and standard deviation of a transformers image processor."""

    def three(value: Any) -> tuple[float, ...]:
        return tuple(float(item) for item in (value if isinstance(value, list | tuple) else [value] * 3))

    return PixelConfig(
        resample=Image.Resampling(image.resample).name.lower(),  # type: ignore[arg-type]
        rescale_factor=float(image.rescale_factor) if image.do_rescale else 1.0,
        mean=three(image.image_mean) if image.do_normalize else (0.0, 0.0, 0.0),
        std=three(image.image_std) if image.do_normalize else (1.0, 1.0, 1.0),
    )


def _describe_idefics3(processor: Any, image: Any, config: Any) -> Idefics3Config:
    edge = image.max_image_size["longest_edge"]
    if image.do_resize and not image.size.longest_edge:
        raise CheckpointError(f"size is {dict(image.size)}; longest_edge is expected")
    features = (edge // config.vision_config.patch_size) ** 2 // config.scale_factor**2
    if features != processor.image_seq_len:
        raise CheckpointError(
            f"image_seq_len is {processor.image_seq_len}, but the model gives {features} features for {edge} pixels"
        )
    return Idefics3Config(
        token=processor.image_token,
        boundary_token=processor.fake_image_token,
        global_token=processor.global_image_tag,
        tile_features=processor.image_seq_len,
        longest_edge=image.size.longest_edge if image.do_resize else None,
        tile_edge=edge,
        split=bool(image.do_image_splitting),
        pixels=describe_pixels(image),
    )


def _describe_llava(processor: Any, image: Any, config: Any) -> LlavaConfig:
    name = type(image).__name__
    if not name.startswith(("CLIP", "Siglip", "Llava")):
        raise CheckpointError(f"the image processor {name} is not known; allowed: CLIP, Siglip and Llava")
    if image.do_pad and not name.startswith("Llava"):
        raise CheckpointError("do_pad is true; only LlavaImageProcessor pads")
    size = image.size
    square = (size.height, size.width) if size.height and size.width else None
    if image.do_resize and (not (square or size.shortest_edge) or size.longest_edge):
        raise CheckpointError(f"size is {dict(size)}; height and width, or shortest_edge, are expected")
    dropped = processor.vision_feature_select_strategy == "default"
    vision = config.vision_config
    tokens = processor.num_additional_image_tokens - dropped
    extra = (vision.model_type == "clip_vision_model") - (config.vision_feature_select_strategy == "default")
    if (tokens, processor.patch_size) != (extra, vision.patch_size):
        raise CheckpointError(
            f"processor_config.json: patch_size {processor.patch_size}, vision_feature_select_strategy "
            f"{processor.vision_feature_select_strategy!r} and num_additional_image_tokens "
            f"{processor.num_additional_image_tokens} do not give the model's features "
            f"(patch_size {vision.patch_size}, {config.vision_feature_select_strategy!r}, {vision.model_type})"
        )
    return LlavaConfig(
        token=processor.image_token,
        pad_color=tuple(int(mean * 255) for mean in image.image_mean) if image.do_pad else None,
        shortest_edge=size.shortest_edge if image.do_resize and not square else None,
        resize=square if image.do_resize else None,
        crop=(image.crop_size.height, image.crop_size.width) if image.do_center_crop else None,
        patch_size=processor.patch_size,
        additional_features=tokens,
        pixels=describe_pixels(image),
    )


def _describe_qwen2_vl(processor: Any, image: Any, config: Any) -> Qwen2VLConfig:
    vision = config.vision_config
    found = image.patch_size, image.temporal_patch_size, image.merge_size
    wanted = vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size
    if found != wanted:
        raise CheckpointError(f"patch_size, temporal_patch_size, merge_size are {found}; the model's are {wanted}")
    if not image.do_resize:
        raise CheckpointError("do_resize is false; patches need a size that they divide")
    return Qwen2VLConfig(
        token=processor.image_token,
        patch_size=image.patch_size,
        temporal_patch_size=image.temporal_patch_size,
        merge_size=image.merge_size,
        min_pixels=image.size.shortest_edge,
        max_pixels=image.size.longest_edge,
        window_size=getattr(vision, "window_size", None) if config.model_type == "qwen2_5_vl" else None,
        pixels=describe_pixels(image),
    )
