"""Operators of the table that move, make, pick or rearrange elements."""

from __future__ import annotations

from fusion.graph.signature import OperatorInfo, family

# Same elements, mostly the same memory. The reshaping ones copy where strides leave no other way.
_VIEWS = family(
    """
alias(Tensor(a) self) -> Tensor(a)
detach(Tensor(a) self) -> Tensor(a)
flatten.using_ints(Tensor(a) self, int start_dim=0, int end_dim=-1) -> Tensor(a)
imag(Tensor(a) self) -> Tensor(a)
lift_fresh(Tensor(a) self) -> Tensor(a)
movedim.int(Tensor(a) self, int source, int destination) -> Tensor(a)
movedim.intlist(Tensor(a) self, int[] source, int[] destination) -> Tensor(a)
mT(Tensor(a) self) -> Tensor(a)
numpy_T(Tensor(a) self) -> Tensor(a)
permute(Tensor(a) self, int[] dims) -> Tensor(a)
ravel(Tensor(a) self) -> Tensor(a)
real(Tensor(a) self) -> Tensor(a)
reshape(Tensor(a) self, SymInt[] shape) -> Tensor(a)
reshape_as(Tensor(a) self, Tensor other) -> Tensor(a)
resolve_conj(Tensor(a) self) -> Tensor(a)
resolve_neg(Tensor(a) self) -> Tensor(a)
squeeze(Tensor(a) self) -> Tensor(a)
squeeze.dim(Tensor(a) self, int dim) -> Tensor(a)
squeeze.dims(Tensor(a) self, int[] dim) -> Tensor(a)
swapaxes(Tensor(a) self, int axis0, int axis1) -> Tensor(a)
swapdims(Tensor(a) self, int dim0, int dim1) -> Tensor(a)
t(Tensor(a) self) -> Tensor(a)
transpose.int(Tensor(a) self, int dim0, int dim1) -> Tensor(a)
unflatten.int(Tensor(a) self, int dim, SymInt[] sizes) -> Tensor(a)
unsqueeze(Tensor(a) self, int dim) -> Tensor(a)
view(Tensor(a) self, SymInt[] size) -> Tensor(a)
view_as(Tensor(a) self, Tensor other) -> Tensor(a)
""",
    cost="view",
    shape="elements",
)

_PARTIAL_VIEWS = family(
    """
chunk(Tensor(a -> *) self, int chunks, int dim=0) -> Tensor(a)[]
diagonal(Tensor(a) self, int offset=0, int dim1=0, int dim2=1) -> Tensor(a)
expand_as(Tensor(a) self, Tensor other) -> Tensor(a)
narrow(Tensor(a) self, int dim, SymInt start, SymInt length) -> Tensor(a)
select.int(Tensor(a) self, int dim, SymInt index) -> Tensor(a)
slice.Tensor(Tensor(a) self, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor(a)
split.sizes(Tensor(a -> *) self, SymInt[] split_size, int dim=0) -> Tensor(a)[]
split.Tensor(Tensor(a -> *) self, SymInt split_size, int dim=0) -> Tensor(a)[]
split_with_sizes(Tensor(a -> *) self, SymInt[] split_sizes, int dim=0) -> Tensor(a)[]
tensor_split.indices(Tensor(a -> *) self, SymInt[] indices, int dim=0) -> Tensor(a)[]
tensor_split.sections(Tensor(a -> *) self, SymInt sections, int dim=0) -> Tensor(a)[]
unbind.int(Tensor(a -> *) self, int dim=0) -> Tensor(a)[]
unfold(Tensor(a) self, int dimension, int size, int step) -> Tensor(a)
view_as_complex(Tensor(a) self) -> Tensor(a)
view_as_real(Tensor(a) self) -> Tensor(a)
""",
    cost="view",
)

_EXPANDED = family(
    """
broadcast_to(Tensor(a) self, SymInt[] size) -> Tensor(a)
expand(Tensor(a) self, SymInt[] size, *, bool implicit=False) -> Tensor(a)
""",
    cost="view",
    shape="expand",
)

# Their results share memory with what they are given, though torch's notation does not say so.
_UNMARKED_VIEWS = family(
    """
broadcast_tensors(Tensor[] tensors) -> Tensor[]
meshgrid(Tensor[] tensors) -> Tensor[]
meshgrid.indexing(Tensor[] tensors, *, str indexing) -> Tensor[]
""",
    cost="view",
    also_aliases=(0,),
)

_MAYBE_COPIES = family(
    """
contiguous(Tensor(a) self, *, MemoryFormat memory_format=0) -> Tensor(a)
to.device(Tensor(a) self, Device device, ScalarType dtype, bool non_blocking=False, bool copy=False, MemoryFormat?
  memory_format=None) -> Tensor(a)
to.dtype(Tensor(a) self, ScalarType dtype, bool non_blocking=False, bool copy=False, MemoryFormat?
  memory_format=None) -> Tensor(a)
to.dtype_layout(Tensor(a) self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool?
  pin_memory=None, bool non_blocking=False, bool copy=False, MemoryFormat? memory_format=None) -> Tensor(a)
to.other(Tensor(a) self, Tensor other, bool non_blocking=False, bool copy=False, MemoryFormat? memory_format=None) ->
  Tensor(a)
""",
    cost="convert",
    shape="same",
)

_UNMARKED_MAYBE_COPIES = family(
    """
type_as(Tensor self, Tensor other) -> Tensor
""",
    cost="convert",
    shape="same",
    also_aliases=(0,),
)

_UNMARKED_RESHAPES = family(
    """
channel_shuffle(Tensor self, SymInt groups) -> Tensor
pixel_shuffle(Tensor self, int upscale_factor) -> Tensor
pixel_unshuffle(Tensor self, int downscale_factor) -> Tensor
_unsafe_view(Tensor self, SymInt[] size) -> Tensor
""",
    cost="memory",
    shape="elements",
    also_aliases=(0,),
)

_COPIES = family(
    """
clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor
lift_fresh_copy(Tensor self) -> Tensor
_to_copy(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None,
  bool non_blocking=False, MemoryFormat? memory_format=None) -> Tensor
""",
    cost="memory",
    shape="same",
)

_REARRANGED = family(
    """
argsort(Tensor self, int dim=-1, bool descending=False) -> Tensor
bucketize.Tensor(Tensor self, Tensor boundaries, *, bool out_int32=False, bool right=False) -> Tensor
col2im(Tensor self, SymInt[2] output_size, int[2] kernel_size, int[2] dilation, int[2] padding, int[2] stride) ->
  Tensor
diag(Tensor self, int diagonal=0) -> Tensor
diag_embed(Tensor self, int offset=0, int dim1=-2, int dim2=-1) -> Tensor
diff(Tensor self, int n=1, int dim=-1, Tensor? prepend=None, Tensor? append=None) -> Tensor
dstack(Tensor[] tensors) -> Tensor
ger(Tensor self, Tensor vec2) -> Tensor
hstack(Tensor[] tensors) -> Tensor
im2col(Tensor self, int[2] kernel_size, int[2] dilation, int[2] padding, int[2] stride) -> Tensor
index_add(Tensor self, int dim, Tensor index, Tensor source, *, Scalar alpha=1) -> Tensor
index_copy(Tensor self, int dim, Tensor index, Tensor source) -> Tensor
index_fill.int_Scalar(Tensor self, int dim, Tensor index, Scalar value) -> Tensor
index_put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor
isin.Tensor_Tensor(Tensor elements, Tensor test_elements, *, bool assume_unique=False, bool invert=False) -> Tensor
linalg_cross(Tensor self, Tensor other, *, int dim=-1) -> Tensor
masked_scatter(Tensor self, Tensor mask, Tensor source) -> Tensor
outer(Tensor self, Tensor vec2) -> Tensor
rot90(Tensor self, int k=1, int[] dims=[0, 1]) -> Tensor
scatter.src(Tensor self, int dim, Tensor index, Tensor src) -> Tensor
scatter.value(Tensor self, int dim, Tensor index, Scalar value) -> Tensor
scatter_add(Tensor self, int dim, Tensor index, Tensor src) -> Tensor
scatter_reduce.two(Tensor self, int dim, Tensor index, Tensor src, str reduce, *, bool include_self=True) -> Tensor
searchsorted.Tensor(Tensor sorted_sequence, Tensor self, *, bool out_int32=False, bool right=False, str? side=None,
  Tensor? sorter=None) -> Tensor
select_scatter(Tensor self, Tensor src, int dim, SymInt index) -> Tensor
slice_scatter(Tensor self, Tensor src, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor
sort(Tensor self, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)
sort.stable(Tensor self, *, bool? stable, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)
topk(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True) -> (Tensor values, Tensor indices)
vstack(Tensor[] tensors) -> Tensor
""",
    cost="memory",
)

_JOINED = family(
    """
cat(Tensor[] tensors, int dim=0) -> Tensor
concat(Tensor[] tensors, int dim=0) -> Tensor
concatenate(Tensor[] tensors, int dim=0) -> Tensor
""",
    cost="memory",
    shape="cat",
)

_STACKED = family(
    """
stack(Tensor[] tensors, int dim=0) -> Tensor
""",
    cost="memory",
    shape="stack",
)

_PADDED = family(
    """
constant_pad_nd(Tensor self, SymInt[] pad, Scalar value=0) -> Tensor
pad(Tensor self, SymInt[] pad, str mode="constant", float? value=None) -> Tensor
reflection_pad1d(Tensor self, SymInt[2] padding) -> Tensor
reflection_pad2d(Tensor self, SymInt[4] padding) -> Tensor
replication_pad1d(Tensor self, SymInt[2] padding) -> Tensor
replication_pad2d(Tensor self, SymInt[4] padding) -> Tensor
""",
    cost="memory",
    shape="pad",
)

_SPREAD = family(
    """
repeat_interleave.self_int(Tensor self, SymInt repeats, int? dim=None, *, SymInt? output_size=None) -> Tensor
""",
    cost="memory",
    shape="repeat_interleave",
)

_ONE_HOT = family(
    """
one_hot(Tensor self, int num_classes=-1) -> Tensor
""",
    cost="memory",
    shape="one_hot",
)

_REPEATED = family(
    """
repeat(Tensor self, SymInt[] repeats) -> Tensor
tile(Tensor self, SymInt[] dims) -> Tensor
""",
    cost="memory",
    shape="repeat",
)

# The shape of the result depends on the data.
_DATA_DEPENDENT = family(
    """
masked_select(Tensor self, Tensor mask) -> Tensor
nonzero(Tensor self) -> Tensor
where(Tensor condition) -> Tensor[]
""",
    cost="memory",
)

_EMBEDDED = family(
    """
embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False, bool sparse=False) ->
  Tensor
""",
    cost="rows",
    shape="embedding",
)

# Only the elements that are picked are read.
_PICKED = family(
    """
gather(Tensor self, int dim, Tensor index, *, bool sparse_grad=False) -> Tensor
index.Tensor(Tensor self, Tensor?[] indices) -> Tensor
index_select(Tensor self, int dim, Tensor index) -> Tensor
take(Tensor self, Tensor index) -> Tensor
take_along_dim(Tensor self, Tensor indices, int? dim=None) -> Tensor
""",
    cost="rows",
)

_CREATED = family(
    """
full(SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool?
  pin_memory=None) -> Tensor
ones(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) ->
  Tensor
zeros(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) ->
  Tensor
""",
    cost="memory",
    shape="size",
)

_CREATED_LIKE = family(
    """
full_like(Tensor self, Scalar fill_value, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool?
  pin_memory=None, MemoryFormat? memory_format=None) -> Tensor
ones_like(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None,
  MemoryFormat? memory_format=None) -> Tensor
zeros_like(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None,
  MemoryFormat? memory_format=None) -> Tensor
""",
    cost="memory",
    shape="same",
)

# new_empty shows old memory until it is filled, so check_graph wants it filled at once.
_CREATED_NEW = family(
    """
new_empty(Tensor self, SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool?
  pin_memory=None) -> Tensor
new_full(Tensor self, SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, Layout? layout=None, Device?
  device=None, bool? pin_memory=None) -> Tensor
new_ones(Tensor self, SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool?
  pin_memory=None) -> Tensor
new_zeros(Tensor self, SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool?
  pin_memory=None) -> Tensor
""",
    cost="memory",
    shape="size",
)

_CREATED_RANGES = family(
    """
arange(Scalar end, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) ->
  Tensor
arange.start(Scalar start, Scalar end, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool?
  pin_memory=None) -> Tensor
arange.start_step(Scalar start, Scalar end, Scalar step=1, *, ScalarType? dtype=None, Layout? layout=None, Device?
  device=None, bool? pin_memory=None) -> Tensor
eye(SymInt n, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
eye.m(SymInt n, SymInt m, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None)
  -> Tensor
linspace(Scalar start, Scalar end, int steps, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None,
  bool? pin_memory=None) -> Tensor
scalar_tensor(Scalar s, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None)
  -> Tensor
""",
    cost="memory",
    shape="range",
)

_RANDOM = family(
    """
rand(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) ->
  Tensor
randint(SymInt high, SymInt[] size, *, ScalarType? dtype=4, Layout? layout=None, Device? device=None, bool?
  pin_memory=None) -> Tensor
randint.low(SymInt low, SymInt high, SymInt[] size, *, ScalarType? dtype=4, Layout? layout=None, Device? device=None,
  bool? pin_memory=None) -> Tensor
randn(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) ->
  Tensor
""",
    cost="random",
    shape="size",
    random=True,
)

_RANDOM_LIKE = family(
    """
bernoulli(Tensor self, *, Generator? generator=None) -> Tensor
bernoulli.p(Tensor self, float p, *, Generator? generator=None) -> Tensor
normal.Tensor_float(Tensor mean, float std=1., *, Generator? generator=None) -> Tensor
rand_like(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None,
  MemoryFormat? memory_format=None) -> Tensor
randint_like(Tensor self, SymInt high, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool?
  pin_memory=None, MemoryFormat? memory_format=None) -> Tensor
randint_like.low_dtype(Tensor self, SymInt low, SymInt high, *, ScalarType? dtype=None, Layout? layout=None, Device?
  device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor
randn_like(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None,
  MemoryFormat? memory_format=None) -> Tensor
""",
    cost="random",
    shape="same",
    random=True,
)

_RANDOM_OTHER = family(
    """
multinomial(Tensor self, SymInt num_samples, bool replacement=False, *, Generator? generator=None) -> Tensor
normal.float_Tensor(float mean, Tensor std, *, Generator? generator=None) -> Tensor
normal.Tensor_Tensor(Tensor mean, Tensor std, *, Generator? generator=None) -> Tensor
randperm(SymInt n, *, ScalarType? dtype=4, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
""",
    cost="random",
    random=True,
)

OPERATORS: tuple[OperatorInfo, ...] = (
    *_VIEWS,
    *_PARTIAL_VIEWS,
    *_EXPANDED,
    *_UNMARKED_VIEWS,
    *_MAYBE_COPIES,
    *_UNMARKED_MAYBE_COPIES,
    *_UNMARKED_RESHAPES,
    *_COPIES,
    *_REARRANGED,
    *_JOINED,
    *_STACKED,
    *_PADDED,
    *_SPREAD,
    *_ONE_HOT,
    *_REPEATED,
    *_DATA_DEPENDENT,
    *_EMBEDDED,
    *_PICKED,
    *_CREATED,
    *_CREATED_LIKE,
    *_CREATED_NEW,
    *_CREATED_RANGES,
    *_RANDOM,
    *_RANDOM_LIKE,
    *_RANDOM_OTHER,
)
