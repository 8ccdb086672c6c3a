"""Random numbers of CUDA devices by one kernel, which torch compiles where one is first drawn.

src/runtime/random.cc makes each from the seed, the step, the operator and the element's place in the whole value, as some twenty
operations on 64-bit numbers for each of which torch has a kernel of its own. Here they are one, with the same numbers. torch's
jiterator compiles it with the NVRTC that is part of torch for CUDA; where that fails, random.cc goes on without.
"""

from . import _motley
from ._errors import warn

# Whole numbers are handed over as 64-bit ones; rows and columns are exact in the type of the result, as they are below 2^24.
_COMMON = """
template <typename T> T motley_mixed(T x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
template <typename T> T motley_divided(T x, T by) {
  return ((x | by) >> 32) == 0 ? T((unsigned int)x / (unsigned int)by) : x / by;
}
template <typename T> T motley_in_whole(T i, T size, T length, T inner, T begin) {
  if (size == 0) return i;
  T place = motley_divided<T>(i, inner);
  T block = motley_divided<T>(place, length);
  return (block * size + begin + (place - block * length)) * inner + (i - place * inner);
}
template <typename T> T motley_bits(T i, T stream, T size, T length, T inner, T begin, T size2, T length2, T inner2, T begin2) {
  i = motley_in_whole<T>(i, size, length, inner, begin);
  i = motley_in_whole<T>(i, size2, length2, inner2, begin2);
  return motley_mixed<T>(stream ^ motley_mixed<T>(i)) >> 11;
}
template <typename T> T NAME(T row, T column, long long stream, long long first, long long width,
                             long long size, long long length, long long inner, long long begin,
                             long long size2, long long length2, long long inner2, long long begin2MORE) {
  typedef unsigned long long Bits;
  Bits i = Bits(first) + Bits((unsigned int)row) * Bits(width) + Bits((unsigned int)column);
  Bits bits = motley_bits<Bits>(i, stream, size, length, inner, begin, size2, length2, inner2, begin2);
  return RESULT;
}
"""


def _source(name, result, more=""):
    return _COMMON.replace("NAME", name).replace("MORE", more).replace("RESULT", result)


UNIFORM = _source("motley_uniform", "T(bits) * T(1.0 / 9007199254740992.0)")  # 2^53
MASK = _source("motley_mask", "bits < Bits(below) ? T(1) : T(0)", ", long long below")

NUMBERS = ("stream", "first", "width", "size", "length", "inner", "begin", "size2", "length2", "inner2", "begin2")


def _compiled(source, numbers):
    from torch.cuda import jiterator

    return jiterator._create_jit_fn(source, **dict.fromkeys(numbers, 0))


class Kernels:
    """What random.cc calls: (rows, columns, numbers, whether a mask is wanted) -> numbers, or None once something failed."""

    def __init__(self, compiled=_compiled):
        self._compiled, self._functions = compiled, {}

    def __call__(self, rows, columns, numbers, masked):
        names = NUMBERS + ("below",) if masked else NUMBERS
        try:
            if masked not in self._functions:
                self._functions[masked] = self._compiled(MASK if masked else UNIFORM, names)
            return self._functions[masked](rows, columns, **dict(zip(names, numbers)))
        except Exception as error:
            if "out of memory" in str(error):
                raise
            lines = str(error).strip().splitlines() or [type(error).__name__]
            warn(f"[distribute] random numbers are drawn by many kernels instead of one, which is slower: {lines[-1].strip()[:200]}")
            return None


def register():
    """From now on random.cc calls it for CUDA devices."""
    _motley.set_numbers_kernel("cuda", Kernels())
