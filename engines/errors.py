"""Every error that SpecEyes raises on purpose; one root, one class per kind of fault."""


class SpecEyesError(Exception):
    """Root of all errors. The message names the field, the value found, what is allowed and what mends it."""


class ConfigError(SpecEyesError, ValueError):
    """A recipe or an option has an unknown key or a value out of range."""


class CheckpointError(SpecEyesError):
    """A checkpoint cannot be compiled: wrong format, unknown family, unmatched weights, too large."""


class ResourceError(SpecEyesError):
    """The machine has not the memory or the disk that a build needs."""


class ExportError(SpecEyesError):
    """A model part could not be turned into a canonical graph."""


class LoweringError(SpecEyesError):
    """A canonical graph holds something that the target cannot run."""


class PredictorError(SpecEyesError):
    """A predictor, or the traces it learns from, belongs to another target or tokenizer, or cannot be trained."""


class AccuracyError(SpecEyesError):
    """A built engine differs from the fp32 model by more than the recipe allows."""


class BundleError(SpecEyesError):
    """A bundle cannot be read."""


class ManifestError(BundleError, ValueError):
    """The manifest is malformed, too large, or of a version that this release does not read."""


class IntegrityError(BundleError):
    """A file of the bundle is missing, surplus, truncated, altered, or leaves the folder."""


class EngineError(SpecEyesError):
    """An engine could not be loaded, bound or run."""


class RequestError(SpecEyesError, ValueError):
    """A request cannot be answered as it was asked."""


class PromptError(RequestError):
    """Messages, roles, placeholders or prompt text are wrong."""


class ContextLengthError(RequestError):
    """Prompt and answer do not fit in the context that the bundle was compiled for."""


class ImageError(RequestError):
    """An image cannot be decoded or is larger than allowed."""
