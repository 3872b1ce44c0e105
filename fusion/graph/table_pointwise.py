"""Operators of the table that work element by element, in place or not, and reductions."""

from __future__ import annotations

from fusion.graph.signature import OperatorInfo, family

_UNARY = family(
    """
abs(Tensor self) -> Tensor
add.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor
bitwise_and.Scalar(Tensor self, Scalar other) -> Tensor
bitwise_not(Tensor self) -> Tensor
bitwise_or.Scalar(Tensor self, Scalar other) -> Tensor
ceil(Tensor self) -> Tensor
clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor
clamp_max(Tensor self, Scalar max) -> Tensor
clamp_min(Tensor self, Scalar min) -> Tensor
cumprod(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor
cumsum(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor
div.Scalar(Tensor self, Scalar other) -> Tensor
div.Scalar_mode(Tensor self, Scalar other, *, str? rounding_mode) -> Tensor
eq.Scalar(Tensor self, Scalar other) -> Tensor
flip(Tensor self, int[] dims) -> Tensor
floor(Tensor self) -> Tensor
floor_divide.Scalar(Tensor self, Scalar other) -> Tensor
fmod.Scalar(Tensor self, Scalar other) -> Tensor
frac(Tensor self) -> Tensor
ge.Scalar(Tensor self, Scalar other) -> Tensor
gt.Scalar(Tensor self, Scalar other) -> Tensor
hardshrink(Tensor self, Scalar lambd=0.5) -> Tensor
hardsigmoid(Tensor self) -> Tensor
hardswish(Tensor self) -> Tensor
hardtanh(Tensor self, Scalar min_val=-1, Scalar max_val=1) -> Tensor
isfinite(Tensor self) -> Tensor
isinf(Tensor self) -> Tensor
isnan(Tensor self) -> Tensor
le.Scalar(Tensor self, Scalar other) -> Tensor
leaky_relu(Tensor self, Scalar negative_slope=0.01) -> Tensor
logical_not(Tensor self) -> Tensor
lt.Scalar(Tensor self, Scalar other) -> Tensor
mul.Scalar(Tensor self, Scalar other) -> Tensor
nan_to_num(Tensor self, float? nan=None, float? posinf=None, float? neginf=None) -> Tensor
ne.Scalar(Tensor self, Scalar other) -> Tensor
neg(Tensor self) -> Tensor
prelu(Tensor self, Tensor weight) -> Tensor
reciprocal(Tensor self) -> Tensor
relu(Tensor self) -> Tensor
relu6(Tensor self) -> Tensor
remainder.Scalar(Tensor self, Scalar other) -> Tensor
roll(Tensor self, SymInt[1] shifts, int[1] dims=[]) -> Tensor
round(Tensor self) -> Tensor
rsqrt(Tensor self) -> Tensor
rsub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor
sign(Tensor self) -> Tensor
softshrink(Tensor self, Scalar lambd=0.5) -> Tensor
sqrt(Tensor self) -> Tensor
square(Tensor self) -> Tensor
sub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor
threshold(Tensor self, Scalar threshold, Scalar value) -> Tensor
tril(Tensor self, SymInt diagonal=0) -> Tensor
triu(Tensor self, SymInt diagonal=0) -> Tensor
trunc(Tensor self) -> Tensor
where.Scalar(Tensor condition, Scalar self, Scalar other) -> Tensor
""",
    cost="memory",
    shape="same",
)

# Their arithmetic, an exponential or the like, takes longer than the memory that they move.
_SPECIAL = family(
    """
atan(Tensor self) -> Tensor
celu(Tensor self, Scalar alpha=1.) -> Tensor
cos(Tensor self) -> Tensor
cosh(Tensor self) -> Tensor
elu(Tensor self, Scalar alpha=1, Scalar scale=1, Scalar input_scale=1) -> Tensor
erf(Tensor self) -> Tensor
erfc(Tensor self) -> Tensor
exp(Tensor self) -> Tensor
exp2(Tensor self) -> Tensor
expm1(Tensor self) -> Tensor
gelu(Tensor self, *, str approximate="none") -> Tensor
log(Tensor self) -> Tensor
log10(Tensor self) -> Tensor
log1p(Tensor self) -> Tensor
log2(Tensor self) -> Tensor
log_sigmoid(Tensor self) -> Tensor
log_softmax.int(Tensor self, int dim, ScalarType? dtype=None) -> Tensor
logcumsumexp(Tensor self, int dim) -> Tensor
logit(Tensor self, float? eps=None) -> Tensor
mish(Tensor self) -> Tensor
pow.Scalar(Scalar self, Tensor exponent) -> Tensor
pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor
selu(Tensor self) -> Tensor
sigmoid(Tensor self) -> Tensor
silu(Tensor self) -> Tensor
sin(Tensor self) -> Tensor
sinh(Tensor self) -> Tensor
softmax.int(Tensor self, int dim, ScalarType? dtype=None) -> Tensor
softplus(Tensor self, Scalar beta=1, Scalar threshold=20) -> Tensor
tan(Tensor self) -> Tensor
tanh(Tensor self) -> Tensor
""",
    cost="special",
    shape="same",
)

_BINARY = family(
    """
add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor
addcdiv(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor
addcmul(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor
__and__.Tensor(Tensor self, Tensor other) -> Tensor
atan2(Tensor self, Tensor other) -> Tensor
bitwise_and.Tensor(Tensor self, Tensor other) -> Tensor
bitwise_or.Tensor(Tensor self, Tensor other) -> Tensor
bitwise_xor.Tensor(Tensor self, Tensor other) -> Tensor
clamp.Tensor(Tensor self, Tensor? min=None, Tensor? max=None) -> Tensor
complex(Tensor real, Tensor imag) -> Tensor
div.Tensor(Tensor self, Tensor other) -> Tensor
div.Tensor_mode(Tensor self, Tensor other, *, str? rounding_mode) -> Tensor
eq.Tensor(Tensor self, Tensor other) -> Tensor
floor_divide(Tensor self, Tensor other) -> Tensor
fmod.Tensor(Tensor self, Tensor other) -> Tensor
ge.Tensor(Tensor self, Tensor other) -> Tensor
gt.Tensor(Tensor self, Tensor other) -> Tensor
isclose(Tensor self, Tensor other, float rtol=1e-05, float atol=1e-08, bool equal_nan=False) -> Tensor
le.Tensor(Tensor self, Tensor other) -> Tensor
lerp.Scalar(Tensor self, Tensor end, Scalar weight) -> Tensor
lerp.Tensor(Tensor self, Tensor end, Tensor weight) -> Tensor
logaddexp(Tensor self, Tensor other) -> Tensor
logical_and(Tensor self, Tensor other) -> Tensor
logical_or(Tensor self, Tensor other) -> Tensor
logical_xor(Tensor self, Tensor other) -> Tensor
lt.Tensor(Tensor self, Tensor other) -> Tensor
masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor
masked_fill.Tensor(Tensor self, Tensor mask, Tensor value) -> Tensor
max.other(Tensor self, Tensor other) -> Tensor
maximum(Tensor self, Tensor other) -> Tensor
min.other(Tensor self, Tensor other) -> Tensor
minimum(Tensor self, Tensor other) -> Tensor
mul.Tensor(Tensor self, Tensor other) -> Tensor
ne.Tensor(Tensor self, Tensor other) -> Tensor
__or__.Tensor(Tensor self, Tensor other) -> Tensor
polar(Tensor abs, Tensor angle) -> Tensor
pow.Tensor_Tensor(Tensor self, Tensor exponent) -> Tensor
remainder.Tensor(Tensor self, Tensor other) -> Tensor
rsub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor
sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor
true_divide.Tensor(Tensor self, Tensor other) -> Tensor
where.ScalarOther(Tensor condition, Tensor self, Scalar other) -> Tensor
where.ScalarSelf(Tensor condition, Scalar self, Tensor other) -> Tensor
where.self(Tensor condition, Tensor self, Tensor other) -> Tensor
xlogy.Tensor(Tensor self, Tensor other) -> Tensor
__xor__.Tensor(Tensor self, Tensor other) -> Tensor
""",
    cost="memory",
    shape="broadcast",
)

_IN_PLACE = family(
    """
abs_(Tensor(a!) self) -> Tensor(a!)
add_.Scalar(Tensor(a!) self, Scalar other, Scalar alpha=1) -> Tensor(a!)
add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)
addcdiv_(Tensor(a!) self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor(a!)
addcmul_(Tensor(a!) self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor(a!)
bitwise_and_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)
bitwise_or_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)
celu_(Tensor(a!) self, Scalar alpha=1.) -> Tensor(a!)
clamp_(Tensor(a!) self, Scalar? min=None, Scalar? max=None) -> Tensor(a!)
clamp_max_(Tensor(a!) self, Scalar max) -> Tensor(a!)
clamp_min_(Tensor(a!) self, Scalar min) -> Tensor(a!)
copy_(Tensor(a!) self, Tensor src, bool non_blocking=False) -> Tensor(a!)
cos_(Tensor(a!) self) -> Tensor(a!)
cumsum_(Tensor(a!) self, int dim, *, ScalarType? dtype=None) -> Tensor(a!)
div_.Scalar(Tensor(a!) self, Scalar other) -> Tensor(a!)
div_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)
elu_(Tensor(a!) self, Scalar alpha=1, Scalar scale=1, Scalar input_scale=1) -> Tensor(a!)
exp_(Tensor(a!) self) -> Tensor(a!)
fill_.Scalar(Tensor(a!) self, Scalar value) -> Tensor(a!)
fill_.Tensor(Tensor(a!) self, Tensor value) -> Tensor(a!)
floor_(Tensor(a!) self) -> Tensor(a!)
gelu_(Tensor(a!) self, *, str approximate="none") -> Tensor(a!)
hardsigmoid_(Tensor(a!) self) -> Tensor(a!)
hardswish_(Tensor(a!) self) -> Tensor(a!)
hardtanh_(Tensor(a!) self, Scalar min_val=-1, Scalar max_val=1) -> Tensor(a!)
index_add_(Tensor(a!) self, int dim, Tensor index, Tensor source, *, Scalar alpha=1) -> Tensor(a!)
index_copy_(Tensor(a!) self, int dim, Tensor index, Tensor source) -> Tensor(a!)
index_fill_.int_Scalar(Tensor(a!) self, int dim, Tensor index, Scalar value) -> Tensor(a!)
index_put_(Tensor(a!) self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor(a!)
leaky_relu_(Tensor(a!) self, Scalar negative_slope=0.01) -> Tensor(a!)
lerp_.Scalar(Tensor(a!) self, Tensor end, Scalar weight) -> Tensor(a!)
log_(Tensor(a!) self) -> Tensor(a!)
logical_not_(Tensor(a!) self) -> Tensor(a!)
masked_fill_.Scalar(Tensor(a!) self, Tensor mask, Scalar value) -> Tensor(a!)
masked_fill_.Tensor(Tensor(a!) self, Tensor mask, Tensor value) -> Tensor(a!)
masked_scatter_(Tensor(a!) self, Tensor mask, Tensor source) -> Tensor(a!)
mish_(Tensor(a!) self) -> Tensor(a!)
mul_.Scalar(Tensor(a!) self, Scalar other) -> Tensor(a!)
mul_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)
neg_(Tensor(a!) self) -> Tensor(a!)
pow_.Scalar(Tensor(a!) self, Scalar exponent) -> Tensor(a!)
reciprocal_(Tensor(a!) self) -> Tensor(a!)
relu6_(Tensor(a!) self) -> Tensor(a!)
relu_(Tensor(a!) self) -> Tensor(a!)
round_(Tensor(a!) self) -> Tensor(a!)
rsqrt_(Tensor(a!) self) -> Tensor(a!)
scatter_.src(Tensor(a!) self, int dim, Tensor index, Tensor src) -> Tensor(a!)
scatter_.value(Tensor(a!) self, int dim, Tensor index, Scalar value) -> Tensor(a!)
scatter_add_(Tensor(a!) self, int dim, Tensor index, Tensor src) -> Tensor(a!)
scatter_reduce_.two(Tensor(a!) self, int dim, Tensor index, Tensor src, str reduce, *, bool include_self=True) ->
  Tensor(a!)
selu_(Tensor(a!) self) -> Tensor(a!)
sigmoid_(Tensor(a!) self) -> Tensor(a!)
silu_(Tensor(a!) self) -> Tensor(a!)
sin_(Tensor(a!) self) -> Tensor(a!)
sqrt_(Tensor(a!) self) -> Tensor(a!)
square_(Tensor(a!) self) -> Tensor(a!)
sub_.Scalar(Tensor(a!) self, Scalar other, Scalar alpha=1) -> Tensor(a!)
sub_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)
tanh_(Tensor(a!) self) -> Tensor(a!)
threshold_(Tensor(a!) self, Scalar threshold, Scalar value) -> Tensor(a!)
tril_(Tensor(a!) self, SymInt diagonal=0) -> Tensor(a!)
triu_(Tensor(a!) self, SymInt diagonal=0) -> Tensor(a!)
zero_(Tensor(a!) self) -> Tensor(a!)
""",
    cost="memory",
    shape="same",
)

_RANDOM_IN_PLACE = family(
    """
bernoulli_.float(Tensor(a!) self, float p=0.5, *, Generator? generator=None) -> Tensor(a!)
bernoulli_.Tensor(Tensor(a!) self, Tensor p, *, Generator? generator=None) -> Tensor(a!)
exponential_(Tensor(a!) self, float lambd=1., *, Generator? generator=None) -> Tensor(a!)
normal_(Tensor(a!) self, float mean=0., float std=1., *, Generator? generator=None) -> Tensor(a!)
uniform_(Tensor(a!) self, float from=0., float to=1., *, Generator? generator=None) -> Tensor(a!)
""",
    cost="random",
    shape="same",
    random=True,
)

_REDUCTIONS = family(
    """
all(Tensor self) -> Tensor
all.dim(Tensor self, int dim, bool keepdim=False) -> Tensor
amax(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor
amin(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor
aminmax(Tensor self, *, int? dim=None, bool keepdim=False) -> (Tensor min, Tensor max)
any(Tensor self) -> Tensor
any.dim(Tensor self, int dim, bool keepdim=False) -> Tensor
argmax(Tensor self, int? dim=None, bool keepdim=False) -> Tensor
argmin(Tensor self, int? dim=None, bool keepdim=False) -> Tensor
cosine_similarity(Tensor x1, Tensor x2, int dim=1, float eps=1e-08) -> Tensor
count_nonzero(Tensor self, int? dim=None) -> Tensor
count_nonzero.dim_IntList(Tensor self, int[] dim) -> Tensor
cummax(Tensor self, int dim) -> (Tensor values, Tensor indices)
cummin(Tensor self, int dim) -> (Tensor values, Tensor indices)
dist(Tensor self, Tensor other, Scalar p=2) -> Tensor
linalg_norm(Tensor self, Scalar? ord=None, int[1]? dim=None, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor
linalg_vector_norm(Tensor self, Scalar ord=2, int[1]? dim=None, bool keepdim=False, *, ScalarType? dtype=None) ->
  Tensor
logsumexp(Tensor self, int[1] dim, bool keepdim=False) -> Tensor
max(Tensor self) -> Tensor
max.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)
mean(Tensor self, *, ScalarType? dtype=None) -> Tensor
mean.dim(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor
median.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)
min(Tensor self) -> Tensor
min.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)
norm.Scalar(Tensor self, Scalar p=2) -> Tensor
norm.ScalarOpt_dim(Tensor self, Scalar? p, int[1] dim, bool keepdim=False) -> Tensor
norm_except_dim(Tensor v, int pow=2, int dim=0) -> Tensor
pairwise_distance(Tensor x1, Tensor x2, float p=2., float eps=1e-06, bool keepdim=False) -> Tensor
prod(Tensor self, *, ScalarType? dtype=None) -> Tensor
prod.dim_int(Tensor self, int dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor
std(Tensor self, bool unbiased=True) -> Tensor
std.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> Tensor
std.dim(Tensor self, int[1]? dim, bool unbiased=True, bool keepdim=False) -> Tensor
std_mean.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> (Tensor,
  Tensor)
sum(Tensor self, *, ScalarType? dtype=None) -> Tensor
sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor
trace(Tensor self) -> Tensor
var(Tensor self, bool unbiased=True) -> Tensor
var.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> Tensor
var.dim(Tensor self, int[1]? dim, bool unbiased=True, bool keepdim=False) -> Tensor
var_mean.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> (Tensor,
  Tensor)
""",
    cost="memory",
)

OPERATORS: tuple[OperatorInfo, ...] = (
    *_UNARY,
    *_SPECIAL,
    *_BINARY,
    *_IN_PLACE,
    *_RANDOM_IN_PLACE,
    *_REDUCTIONS,
)
