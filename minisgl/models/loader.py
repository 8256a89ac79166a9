"""Loading: build the model without memory, compare it with the checkpoint's headers, then allocate and fill it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import nn

from minisgl.errors import ModelLoadError
from minisgl.layers.attention import Attention
from minisgl.layers.norm import RMSNorm
from minisgl.layers.quantization import QuantizedWeight, check_device
from minisgl.layers.sharding import SINGLE_RANK, Communicator, PackedWeights, ShardedParameters, ShardSpec
from minisgl.models.checkpoint_formats import declared_quantization
from minisgl.models.config import MODELS, ModelConfig
from minisgl.models.quantization import (
    FLOATS,
    ImpliedTensor,
    Mxfp4Target,
    QuantizedTarget,
    SourceTensor,
    implied_tensors,
    plan_quantization,
    quantize_weights,
    source_names,
)
from minisgl.registry import resolve

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DUMMY_STD = 0.02


def load_model(
    path: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    communicator: Communicator = SINGLE_RANK,
    quantization: str = "auto",
) -> nn.Module:
    """Build this rank's shard of the model in the directory ``path``, and fill in its weights.

    Peak memory is the weights plus, on the CPU, the pages of one checkpoint file.

    Args:
        load_format: ``"auto"`` reads safetensors; ``"dummy"`` draws weights from a normal distribution with standard
            deviation 0.02, and 1 for norms.
        seed: of the dummy weights; the model is the same for any number of ranks.
        quantization: a name in `minisgl.layers.quantization.QUANTIZERS` or ``"module:Class"``; ``"auto"`` is what the
            checkpoint declares, and ``"none"`` dequantises.

    Raises:
        ConfigError: the ranks cannot share the model, or it cannot be quantised like that.
        ModelLoadError: files are missing or damaged, or tensors are missing, unexpected, of the wrong shape or of an
            unsupported dtype. The error names all such tensors, and comes before any memory is allocated.
    """
    with torch.device("meta"):
        model = resolve("architecture", config.architecture, MODELS)(config, communicator)
    targets = _with_their_names(model, checkpoint_targets(model))
    declared = declared_quantization(path)
    plan = plan_quantization(quantization, declared, dummy=load_format == "dummy")
    quantized = quantize_weights(model, targets, plan, dtype)
    dtypes = [parameter.dtype for parameter in model.parameters()]
    check_device("quantization", dtypes, device, "'int4', or 'none' for a checkpoint in fp8")
    if load_format == "dummy":
        _materialize(model, dtype, device)
        _fill_randomly(targets, device, seed)
        _fill_quantized_randomly(quantized, dtype, device, seed)
    else:
        expected = {name: SourceTensor(target.shape) for name, target in targets.items()}
        expected |= {name: source for _, name, source in source_names(quantized)}
        implied = {name: each for name, each in implied_tensors(quantized).items() if name not in expected}
        not_ours: tuple[str, ...] = getattr(model, "unused", ())
        found = read_headers(path)
        headers = {
            name: header
            for name, header in found.items()
            if name in expected or not (_ignored(name, config) or name in implied or name.startswith(not_ours))
        }
        _check(expected, headers, path)
        _check_implied(implied, found)
        _materialize(model, dtype, device)
        _fill(targets, {name: header for name, header in headers.items() if name in targets})
        _fill_quantized(quantized, headers, device)
    if (order := config.rope.head_order(config.head_dim)) is not None:
        for module in model.modules():
            if isinstance(module, Attention):
                module.reorder_heads(order)
    return model.eval()


def load_weights(
    module: nn.Module, path: Path, dtype: torch.dtype, device: torch.device, unused: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """Fill a module that was built on the meta device with the weights in ``path``; return the ``unused`` ones there.

    Those are on the CPU, as they are stored. Raises `ModelLoadError` like `load_model`.
    """
    targets, headers = checkpoint_targets(module), read_headers(path)
    found = {name: headers.pop(name) for name in unused if name in headers}
    _check({name: SourceTensor(target.shape) for name, target in targets.items()}, headers, path)
    _materialize(module, dtype, device)
    _fill(targets, headers)
    tensors: dict[str, torch.Tensor] = {}
    for name, header in found.items():
        with safe_open(header.file, framework="pt") as file:
            tensors[name] = file.get_tensor(name)
    return tensors


# -- what the model needs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Where a checkpoint tensor, or its shard by ``shard_spec``, goes: the region ``module.<parameter>[index]``."""

    module: nn.Module
    parameter: str
    index: tuple[int | slice, ...]
    shard_spec: ShardSpec | None = None

    @property
    def region(self) -> torch.Tensor:
        """A view of the region, on the device where the parameter is now."""
        parameter: torch.Tensor = getattr(self.module, self.parameter)
        return parameter[self.index]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole checkpoint tensor."""
        shape = list(self.region.shape)
        if self.shard_spec is not None:
            shape[self.shard_spec.dim] = self.shard_spec.total
        return tuple(shape)

    def fill(self, shard: torch.Tensor) -> None:
        """Copy ``shard`` into the region. Where the region is larger, it is padding, and becomes zero."""
        region = self.region
        for dim, filled in enumerate(shard.shape):
            region.narrow(dim, filled, region.shape[dim] - filled).zero_()
            region = region.narrow(dim, 0, filled)
        region.copy_(shard)

    def load(self, tensor: torch.Tensor) -> None:
        """Take this rank's part of the whole checkpoint tensor."""
        if self.shard_spec is None:
            self.region.copy_(tensor)
        else:
            self.fill(self.shard_spec.of(tensor))


def checkpoint_targets(model: nn.Module) -> dict[str, WeightTarget]:
    """Name of every tensor that a checkpoint of ``model`` must have → where it goes."""
    targets: dict[str, WeightTarget] = {}
    for prefix, module in model.named_modules():
        parts = module.weight_parts() if isinstance(module, PackedWeights) else []
        parent = prefix.rpartition(".")[0]
        for part in parts:
            spec = _unless_whole(part.shard_spec)
            targets[_join(parent, part.source)] = WeightTarget(module, part.parameter, part.index, spec)
        packed = {part.parameter for part in parts}
        specs = module.shard_specs() if isinstance(module, ShardedParameters) else {}
        for name, _ in module.named_parameters(recurse=False):
            if name not in packed:
                targets[_join(prefix, name)] = WeightTarget(module, name, (), _unless_whole(specs.get(name)))
    return targets


def _with_their_names(model: nn.Module, targets: dict[str, WeightTarget]) -> dict[str, WeightTarget]:
    """``targets`` by the names that checkpoints of this architecture have for them."""
    theirs: Mapping[str, str] = getattr(model, "checkpoint_names", {})
    return {".".join(theirs.get(part, part) for part in name.split(".")): each for name, each in targets.items()}


def _unless_whole(shard_spec: ShardSpec | None) -> ShardSpec | None:
    return None if shard_spec is None or all(shard.is_whole for shard in shard_spec.shards) else shard_spec


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


# -- what the checkpoint has -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a safetensors header says of one tensor; ``dtype`` is safetensors' name, such as ``"BF16"``."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_headers(path: str | Path) -> dict[str, TensorHeader]:
    """Read the headers of all tensors in a model directory, which has one safetensors file or several.

    Raises `ModelLoadError` if there are no weights, or a file is missing, truncated or corrupt.
    """
    headers: dict[str, TensorHeader] = {}
    for path_of_file in _weight_files(Path(path)):
        try:
            with safe_open(path_of_file, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                    tensor = file.get_slice(name)
                    headers[name] = TensorHeader(path_of_file, tuple(tensor.get_shape()), tensor.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path_of_file}: truncated or corrupt ({error}); download it again") from error
    return headers


def _weight_files(path: Path) -> list[Path]:
    index = path / INDEX_FILE
    if index.is_file():
        files = _indexed_files(index)
    elif (path / SINGLE_FILE).is_file():
        files = [path / SINGLE_FILE]
    else:
        raise ModelLoadError(
            f"{path}: no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there; other formats must be converted to "
            "safetensors, and load_format='dummy' needs no weights"
        )
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelLoadError(f"{path}: missing shards named by {INDEX_FILE}: {', '.join(missing)}; download them again")
    return files


def _indexed_files(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [index.parent / name for name in sorted(set(weight_map.values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index}: not a valid index ({error!r}); download it again") from error


def _ignored(name: str, config: ModelConfig) -> bool:
    """Whether this is a tensor that some exports add without need: the tied LM head, or a table of frequencies."""
    if name.endswith("lm_head.weight") and config.tie_word_embeddings:
        return True
    return name.endswith("rotary_emb.inv_freq")


# -- from one to the other ---------------------------------------------------------------------------------------------


def _check(expected: dict[str, SourceTensor], headers: dict[str, TensorHeader], path: str | Path) -> None:
    problems = list(_problems(expected, headers))
    if problems:
        listing = "\n".join(f"  {problem}" for problem in problems)
        raise ModelLoadError(f"{path}: the checkpoint does not fit its config.json:\n{listing}")


def _problems(expected: dict[str, SourceTensor], headers: dict[str, TensorHeader]) -> Iterator[str]:
    for name, source in expected.items():
        if name not in headers:
            yield f"missing: {name} {source.shape}"
    for name, header in headers.items():
        if name not in expected:
            yield f"unexpected: {name} {header.shape} in {header.file.name}"
            continue
        source = expected[name]
        if not source.fits(header.shape):
            yield f"wrong shape: {name} is {header.shape} in {header.file.name}, expected {source.shape}"
        if header.dtype not in source.dtypes:
            wanted = "quantised weights cannot be read" if source.dtypes == FLOATS else f"expected {source.dtype_names}"
            yield f"unsupported dtype: {name} is {header.dtype} in {header.file.name}; {wanted}"


def _check_implied(implied: Mapping[str, ImpliedTensor], headers: Mapping[str, TensorHeader]) -> None:
    there = sorted(implied.keys() & headers.keys(), key=lambda name: (headers[name].file, name))
    for path, names in groupby(there, key=lambda name: headers[name].file):
        with safe_open(path, framework="pt") as file:
            for name in names:
                tensor, content = file.get_tensor(name), implied[name].content
                if not torch.equal(tensor.double(), content.double()):  # of any dtype
                    raise ModelLoadError(f"{path}: {name}: {implied[name].otherwise}; choose another checkpoint")


def _materialize(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Allocate the parameters. Buffers have their values since the model was built, and only move."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            stored = parameter.dtype if isinstance(module, QuantizedWeight) else dtype
            memory = torch.empty(parameter.shape, dtype=stored, device=device)
            module.register_parameter(name, nn.Parameter(memory, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _fill(targets: dict[str, WeightTarget], headers: dict[str, TensorHeader]) -> None:
    """Copy every tensor to its target, one file after the other, so that only one is mapped at a time."""
    names_in: defaultdict[Path, list[str]] = defaultdict(list)
    for name, header in headers.items():
        names_in[header.file].append(name)
    for path, names in names_in.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                target = targets[name]
                if target.shard_spec is None:
                    target.region.copy_(file.get_tensor(name))
                else:
                    target.fill(target.shard_spec.of(file.get_slice(name)))


def _fill_randomly(targets: dict[str, WeightTarget], device: torch.device, seed: int) -> None:
    generator = torch.Generator(device)
    for name, target in targets.items():
        if isinstance(target.module, RMSNorm):
            target.region.fill_(1.0)
            continue
        # A random stream for each tensor, so that any rank can draw the whole tensor and keep its shard.
        generator.manual_seed(xxhash.xxh64_intdigest(name.encode(), seed))
        if target.shard_spec is None:
            target.region.normal_(std=_DUMMY_STD, generator=generator)
        else:
            tensor = torch.empty(target.shape, dtype=target.region.dtype, device=device)
            target.fill(target.shard_spec.of(tensor.normal_(std=_DUMMY_STD, generator=generator)))


def _fill_quantized(
    targets: dict[str, QuantizedTarget | Mxfp4Target], headers: dict[str, TensorHeader], device: torch.device
) -> None:
    """Convert one weight after the other on ``device``, so that only one takes memory twice."""
    with ExitStack() as stack:
        open_files: dict[Path, safe_open] = {}
        for name, target in targets.items():
            tensors = {}
            for end in target.sources:
                source = f"{name.removesuffix('weight')}{end}"
                path = headers[source].file
                if path not in open_files:
                    open_files[path] = stack.enter_context(safe_open(path, framework="pt"))
                tensors[end] = open_files[path].get_tensor(source).to(device)  # type: ignore[no-untyped-call]
            target.fill(tensors)


def _fill_quantized_randomly(
    targets: dict[str, QuantizedTarget | Mxfp4Target], dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    """Quantise the weights that `_fill_randomly` would have drawn."""
    generator = torch.Generator(device)
    for name, target in targets.items():
        generator.manual_seed(xxhash.xxh64_intdigest(name.encode(), seed))
        weight = torch.empty(target.shape, dtype=dtype, device=device)
        target.fill({"weight": weight.normal_(std=_DUMMY_STD, generator=generator)})
