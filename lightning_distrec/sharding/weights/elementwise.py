"""The operations of torch that treat every element alone, so that they are exact on a shard."""


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


_NAMES = words("""
    abs add addcdiv addcmul bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip clone
    contiguous copy copysign div divide detach erf erfinv eq exp expm1 fill float floor floor_divide fmod full_like ge
    gt half bfloat16 double isfinite isinf isnan le lerp log log1p log2 log10 logical_and logical_not logical_or
    logical_xor lt maximum minimum mul multiply nan_to_num ne neg negative ones_like pow positive reciprocal relu
    remainder round rsqrt sgn sigmoid sign sqrt square sub subtract tanh to true_divide trunc type_as where zero
    zeros_like empty_like cpu cuda coalesce masked_fill softplus hardtanh threshold
""")
_OPERATORS = words("""
    abs add and div eq floordiv ge gt iadd iand idiv ifloordiv imod imul invert ior ipow isub itruediv ixor le lt mod
    mul ne neg or pos pow radd rdiv rmod rmul rpow rsub rtruediv sub truediv xor
""")
ELEMENTWISE = _NAMES | {f"{name}_" for name in _NAMES} | {f"__{name}__" for name in _OPERATORS}


def is_elementwise(name: str) -> bool:
    """Return whether the operation of torch or of Tensor with this name treats every element alone."""
    return name.removeprefix("_foreach_") in ELEMENTWISE
