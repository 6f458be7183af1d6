"""Operations of JAX, by name: what each does with rows, with sums over rows, and with numbers."""

from multitower.checks.equations import SAME

# They sum over rows.
SUMS = {
    "reduce_sum", "dot_general", "conv_general_dilated", "add_any", "psum", "psum_invariant",
    "scatter-add",
}  # fmt: skip
# They make a sum over rows of one such sum, of several, or of one and what is free of rows.
LINEAR_ALONE = {
    "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims", "neg", "pad",
    "pvary", "reduce_precision", "reduce_sum", "reshape", "reshard", "real", "imag", "rev", "slice",
    "split", "squeeze", "stop_gradient", "transpose", "concatenate", "dynamic_slice", "gather",
    "cumsum", "sharding_constraint", "stack", "unstack", "tile",
    "fft", "reduce_window_sum",
}  # fmt: skip
LINEAR_TOGETHER = {"add", "add_any", "sub", "concatenate", "stack", "select_n", "pad"}
LINEAR_WITH_FREE = {"mul", "dot_general", "conv_general_dilated"}
# They leave a number that is as large as one tower's sum over rows about as large.
KEEP_THE_SIZE = {
    "add", "broadcast_in_dim", "convert_element_type", "copy", "max", "mul", "reshape", "squeeze",
    "stop_gradient", "sub",
}  # fmt: skip

# They put values side by side.
STACKS = ("concatenate", "stack")
# They go along an axis, and leave as many entries on it.
CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")

# Each result of theirs is one of their inputs.
HANDS_ON = {"name", "device_put", "optimization_barrier"}
# What does not change a value, and what makes copies of its numbers.
SAME_NUMBERS = {*SAME, "broadcast_in_dim", "expand_dims"}

# The call of a function with a backward rule of its own.
WITH_A_RULE = "custom_vjp_call"
# They run programs, again or one of several; see `loops`.
RUN_PROGRAMS = ("scan", "while", "cond", "custom_linear_solve")
# They write into an array: the inputs that are the array, and what is written.
WRITTEN = {"scatter": (0, 2), "scatter-add": (0, 2), "dynamic_update_slice": (0, 1)}
# They hold rows, or one of their elements, in a value without an axis of rows.
HOLDS = {
    "approx_top_k", "concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "reduce_and",
    "reduce_max", "reduce_min", "reduce_or", "reduce_window_max", "reduce_window_min", "scatter",
    "scatter-max", "scatter-min", "slice", "stack", "top_k", "unstack",
}  # fmt: skip
SCATTERS = (
    "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max",
)  # fmt: skip
# They add up along axes, or products along them.
ADD_UP = ("reduce_sum", "dot_general")
# They find a place by its numbers: the inputs that are no such numbers.
FINDS = {
    "gather": (0,), "dynamic_slice": (0,), "dynamic_update_slice": (0, 1),
    **dict.fromkeys(SCATTERS, (0, 2)),
}  # fmt: skip

# What they make of a mean over each tower's rows is, averaged, not what they make of the mean over
# all rows. Products and roots are left out: the variances of BatchNorm are meant.
BENDS = {
    "exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "pow", "rsqrt", "abs", "max", "min",
    "clamp", "round", "floor", "ceil", "sign", "eq", "ne", "lt", "le", "gt", "ge", "argmax",
    "argmin", "reduce_max", "reduce_min", "sort", "top_k", "approx_top_k", "cholesky", "eigh", "lu",
    "qr", "svd", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh",
    "acosh", "atanh", "erf", "erfc", "erf_inv", "lgamma", "digamma", "cbrt", "rem", "cumprod",
    "cummax", "cummin", "cumlogsumexp",
}  # fmt: skip
# What they make of all rows is no mean of theirs. Whether any or all rows are something is left
# out: mostly it is whether all are finite.
DECIDES = {
    "reduce_prod", "argmax", "argmin", "svd", "qr", "reduce", "reduce_window", "scatter-mul",
}  # fmt: skip
# So is what is divided by such a mean: the number of the input that divides.
DIVISORS = {"div": 1, "triangular_solve": 0}
# Of BENDS, what normalising rows does with no statistic of theirs.
BENDS_NO_NORM = {"exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh"}
# Of BENDS, what a variance may need too, which is a mean over rows less their mean, or zero.
CLIPS = {"max", "min", "clamp", "abs"}
# Of BENDS, what nobody keeps of a variance as if it were one.
BENDS_VARIANCES = {*BENDS_NO_NORM, "rsqrt"}
# Whether any or all of several answers are yes.
ANY_OR_ALL = {"reduce_or", "reduce_and"}
JOINS_ANSWERS = {*ANY_OR_ALL, "not", "and", "or", *SAME_NUMBERS}
# Equinox asks so whether any row needs a branch, whose result the other rows do not take.
WHETHER_ANY = ("unvmap_any", "unvmap_all", "unvmap_max")
# Their results are the same in every tower.
ALIKE = {"psum", "pmax", "pmin", "all_gather"}
# What they make of a multiple of a value is no multiple of what they make of the value.
WARPS = {
    "exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "sin", "cos", "tan", "atan", "sinh",
    "cosh", "asinh", "acosh", "erf", "erfc", "erf_inv", "round", "floor", "ceil", "rem",
}  # fmt: skip
# They write into a reference, jax.new_ref.
INTO_REFS = ("swap", "addupdate")
# They draw random numbers.
DRAWS = {"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"}
