"""Chapter 11, second half: kernels that do in one pass over memory what the layers of chapter 2 do in several.

Each has a plain PyTorch twin, the code that it replaces, and is tested against it. Triton is imported by the modules
that hold kernels and by nothing else, so that this package can be imported where there is no Triton.
"""

from minisgl.kernels.choice import FUSIONS, LAYER_FUSIONS, apply_fusions, choose_fusions, choose_sampler, has_triton

__all__ = ["FUSIONS", "LAYER_FUSIONS", "apply_fusions", "choose_fusions", "choose_sampler", "has_triton"]
