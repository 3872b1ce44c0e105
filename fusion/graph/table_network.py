"""Operators of the table that layers and losses are made of, our own dropout, and arithmetic on integers."""

from __future__ import annotations

from fusion.graph.signature import OperatorInfo, family

_LINEAR = family(
    """
linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor
""",
    cost="linear",
    shape="linear",
)

_MATMUL = family(
    """
matmul(Tensor self, Tensor other) -> Tensor
""",
    cost="matmul",
    shape="matmul",
)

_MM = family(
    """
bmm(Tensor self, Tensor mat2) -> Tensor
dot(Tensor self, Tensor tensor) -> Tensor
mm(Tensor self, Tensor mat2) -> Tensor
mv(Tensor self, Tensor vec) -> Tensor
vdot(Tensor self, Tensor other) -> Tensor
""",
    cost="matmul",
    shape="matmul",
)

_ADDMM = family(
    """
addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor
addmv(Tensor self, Tensor mat, Tensor vec, *, Scalar beta=1, Scalar alpha=1) -> Tensor
baddbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor
""",
    cost="addmm",
    shape="addmm",
)

# With one tensor it may be a mere transposition.
_EINSUM = family(
    """
einsum(str equation, Tensor[] tensors, *, int[]? path=None) -> Tensor
""",
    cost="einsum",
    also_aliases=(1,),
)

_TENSORDOT = family(
    """
tensordot(Tensor self, Tensor other, int[] dims_self, int[] dims_other) -> Tensor
""",
    cost="tensordot",
)

_BILINEAR = family(
    """
bilinear(Tensor input1, Tensor input2, Tensor weight, Tensor? bias=None) -> Tensor
""",
    cost="bilinear",
)

_CDIST = family(
    """
cdist(Tensor x1, Tensor x2, float p=2., int? compute_mode=None) -> Tensor
""",
    cost="cdist",
)

_CONV = family(
    """
conv1d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[1] stride=[1], SymInt[1] padding=[0], SymInt[1]
  dilation=[1], SymInt groups=1) -> Tensor
conv1d.padding(Tensor input, Tensor weight, Tensor? bias=None, SymInt[1] stride=[1], str padding="valid", SymInt[1]
  dilation=[1], SymInt groups=1) -> Tensor
conv2d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=[1, 1], SymInt[2] padding=[0, 0], SymInt[2]
  dilation=[1, 1], SymInt groups=1) -> Tensor
conv2d.padding(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=[1, 1], str padding="valid",
  SymInt[2] dilation=[1, 1], SymInt groups=1) -> Tensor
conv3d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[3] stride=[1, 1, 1], SymInt[3] padding=[0, 0, 0],
  SymInt[3] dilation=[1, 1, 1], SymInt groups=1) -> Tensor
conv3d.padding(Tensor input, Tensor weight, Tensor? bias=None, SymInt[3] stride=[1, 1, 1], str padding="valid",
  SymInt[3] dilation=[1, 1, 1], SymInt groups=1) -> Tensor
""",
    cost="conv",
    shape="conv",
)

_CONV_TRANSPOSE = family(
    """
conv_transpose1d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[1] stride=[1], SymInt[1] padding=[0],
  SymInt[1] output_padding=[0], SymInt groups=1, SymInt[1] dilation=[1]) -> Tensor
conv_transpose2d.input(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=[1, 1], SymInt[2] padding=[0,
  0], SymInt[2] output_padding=[0, 0], SymInt groups=1, SymInt[2] dilation=[1, 1]) -> Tensor
conv_transpose3d.input(Tensor input, Tensor weight, Tensor? bias=None, SymInt[3] stride=[1, 1, 1], SymInt[3]
  padding=[0, 0, 0], SymInt[3] output_padding=[0, 0, 0], SymInt groups=1, SymInt[3] dilation=[1, 1, 1]) -> Tensor
""",
    cost="conv_transpose",
)

_ATTENTION = family(
    """
scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0., bool
  is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor
""",
    cost="attention",
    random=True,
)

_RECURRENT = family(
    """
gru.input(Tensor input, Tensor hx, Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool
  bidirectional, bool batch_first) -> (Tensor, Tensor)
lstm.input(Tensor input, Tensor[] hx, Tensor[] params, bool has_biases, int num_layers, float dropout, bool train,
  bool bidirectional, bool batch_first) -> (Tensor, Tensor, Tensor)
rnn_relu.input(Tensor input, Tensor hx, Tensor[] params, bool has_biases, int num_layers, float dropout, bool train,
  bool bidirectional, bool batch_first) -> (Tensor, Tensor)
rnn_tanh.input(Tensor input, Tensor hx, Tensor[] params, bool has_biases, int num_layers, float dropout, bool train,
  bool bidirectional, bool batch_first) -> (Tensor, Tensor)
""",
    cost="recurrent",
    random=True,
)

_CELLS = family(
    """
gru_cell(Tensor input, Tensor hx, Tensor w_ih, Tensor w_hh, Tensor? b_ih=None, Tensor? b_hh=None) -> Tensor
lstm_cell(Tensor input, Tensor[] hx, Tensor w_ih, Tensor w_hh, Tensor? b_ih=None, Tensor? b_hh=None) -> (Tensor,
  Tensor)
rnn_relu_cell(Tensor input, Tensor hx, Tensor w_ih, Tensor w_hh, Tensor? b_ih=None, Tensor? b_hh=None) -> Tensor
rnn_tanh_cell(Tensor input, Tensor hx, Tensor w_ih, Tensor w_hh, Tensor? b_ih=None, Tensor? b_hh=None) -> Tensor
""",
    cost="cell",
)

_NORMS = family(
    """
group_norm(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, bool
  cudnn_enabled=True) -> Tensor
layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, bool
  cudnn_enable=True) -> Tensor
rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None) -> Tensor
""",
    cost="norm",
    shape="same",
)

# They change their running statistics, though torch's notation denies it.
_NORMS_WITH_STATISTICS = family(
    """
batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, bool training,
  float momentum, float eps, bool cudnn_enabled) -> Tensor
instance_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, bool
  use_input_stats, float momentum, float eps, bool cudnn_enabled) -> Tensor
""",
    cost="batch_norm",
    shape="same",
    also_mutates=(3, 4),
)

_WEIGHT_NORM = family(
    """
_weight_norm(Tensor v, Tensor g, int dim=0) -> Tensor
""",
    cost="memory",
    shape="same",
)

_LOSSES = family(
    """
binary_cross_entropy(Tensor self, Tensor target, Tensor? weight=None, int reduction=1) -> Tensor
binary_cross_entropy_with_logits(Tensor self, Tensor target, Tensor? weight=None, Tensor? pos_weight=None, int
  reduction=1) -> Tensor
cosine_embedding_loss(Tensor input1, Tensor input2, Tensor target, float margin=0., int reduction=1) -> Tensor
hinge_embedding_loss(Tensor self, Tensor target, float margin=1., int reduction=1) -> Tensor
huber_loss(Tensor self, Tensor target, int reduction=1, float delta=1.) -> Tensor
kl_div(Tensor self, Tensor target, int reduction=1, *, bool log_target=False) -> Tensor
l1_loss(Tensor self, Tensor target, int reduction=1) -> Tensor
margin_ranking_loss(Tensor input1, Tensor input2, Tensor target, float margin=0., int reduction=1) -> Tensor
mse_loss(Tensor self, Tensor target, int reduction=1) -> Tensor
multi_margin_loss(Tensor self, Tensor target, Scalar p=1, Scalar margin=1, Tensor? weight=None, int reduction=1) ->
  Tensor
nll_loss(Tensor self, Tensor target, Tensor? weight=None, int reduction=1, SymInt ignore_index=-100) -> Tensor
nll_loss2d(Tensor self, Tensor target, Tensor? weight=None, int reduction=1, SymInt ignore_index=-100) -> Tensor
nll_loss_nd(Tensor self, Tensor target, Tensor? weight=None, int reduction=1, SymInt ignore_index=-100) -> Tensor
poisson_nll_loss(Tensor input, Tensor target, bool log_input, bool full, float eps, int reduction) -> Tensor
smooth_l1_loss(Tensor self, Tensor target, int reduction=1, float beta=1.) -> Tensor
soft_margin_loss(Tensor self, Tensor target, int reduction=1) -> Tensor
triplet_margin_loss(Tensor anchor, Tensor positive, Tensor negative, float margin=1., float p=2., float eps=1e-06,
  bool swap=False, int reduction=1) -> Tensor
""",
    cost="memory",
)

# Their exponentials take longer than the memory that they move.
_SPECIAL = family(
    """
cross_entropy_loss(Tensor self, Tensor target, Tensor? weight=None, int reduction=1, SymInt ignore_index=-100, float
  label_smoothing=0.) -> Tensor
glu(Tensor self, int dim=-1) -> Tensor
""",
    cost="special",
)

_POOLS = family(
    """
avg_pool1d(Tensor self, int[1] kernel_size, int[1] stride=[], int[1] padding=[0], bool ceil_mode=False, bool
  count_include_pad=True) -> Tensor
avg_pool2d(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, bool ceil_mode=False, bool
  count_include_pad=True, int? divisor_override=None) -> Tensor
avg_pool3d(Tensor self, int[3] kernel_size, int[3] stride=[], int[3] padding=0, bool ceil_mode=False, bool
  count_include_pad=True, int? divisor_override=None) -> Tensor
max_pool1d(Tensor self, int[1] kernel_size, int[1] stride=[], int[1] padding=[0], int[1] dilation=[1], bool
  ceil_mode=False) -> Tensor
max_pool1d_with_indices(Tensor self, int[1] kernel_size, int[1] stride=[], int[1] padding=[0], int[1] dilation=[1],
  bool ceil_mode=False) -> (Tensor, Tensor)
max_pool2d(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, int[2] dilation=1, bool
  ceil_mode=False) -> Tensor
max_pool2d_with_indices(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, int[2] dilation=1, bool
  ceil_mode=False) -> (Tensor, Tensor)
max_pool3d(Tensor self, int[3] kernel_size, int[3] stride=[], int[3] padding=0, int[3] dilation=1, bool
  ceil_mode=False) -> Tensor
""",
    cost="pool",
)

_ADAPTIVE_POOLS = family(
    """
adaptive_avg_pool1d(Tensor self, int[1] output_size) -> Tensor
adaptive_avg_pool2d(Tensor self, SymInt[2] output_size) -> Tensor
adaptive_avg_pool3d(Tensor self, SymInt[3] output_size) -> Tensor
adaptive_max_pool1d(Tensor self, int[1] output_size) -> (Tensor, Tensor)
adaptive_max_pool2d(Tensor self, int[2] output_size) -> (Tensor, Tensor)
""",
    cost="pool",
    shape="output_size",
)

_BAGS = family(
    """
embedding_bag.padding_idx(Tensor weight, Tensor indices, Tensor offsets, bool scale_grad_by_freq, int mode, bool
  sparse, Tensor? per_sample_weights, bool include_last_offset, int? padding_idx) -> (Tensor, Tensor, Tensor, Tensor)
""",
    cost="rows",
)

_INTERPOLATION = family(
    """
upsample_bicubic2d.vec(Tensor input, SymInt[]? output_size, bool align_corners, float[]? scale_factors) -> Tensor
_upsample_bicubic2d_aa.vec(Tensor input, SymInt[]? output_size, bool align_corners, float[]? scale_factors) -> Tensor
upsample_bilinear2d.vec(Tensor input, SymInt[]? output_size, bool align_corners, float[]? scale_factors) -> Tensor
_upsample_bilinear2d_aa.vec(Tensor input, SymInt[]? output_size, bool align_corners, float[]? scale_factors) ->
  Tensor
upsample_linear1d.vec(Tensor input, SymInt[]? output_size, bool align_corners, float[]? scale_factors) -> Tensor
upsample_nearest1d.vec(Tensor input, SymInt[]? output_size, float[]? scale_factors) -> Tensor
upsample_nearest2d.vec(Tensor input, SymInt[]? output_size, float[]? scale_factors) -> Tensor
upsample_nearest3d.vec(Tensor input, SymInt[]? output_size, float[]? scale_factors) -> Tensor
_upsample_nearest_exact1d.vec(Tensor input, SymInt[]? output_size, float[]? scale_factors) -> Tensor
_upsample_nearest_exact2d.vec(Tensor input, SymInt[]? output_size, float[]? scale_factors) -> Tensor
upsample_trilinear3d.vec(Tensor input, SymInt[]? output_size, bool align_corners, float[]? scale_factors) -> Tensor
""",
    cost="memory",
    shape="output_size",
)

_GRIDS = family(
    """
affine_grid_generator(Tensor theta, SymInt[] size, bool align_corners) -> Tensor
grid_sampler(Tensor input, Tensor grid, int interpolation_mode, int padding_mode, bool align_corners) -> Tensor
""",
    cost="memory",
)

# Outside training they return what they are given. Plain dropout is our own operator below.
_DROPOUTS = family(
    """
alpha_dropout(Tensor input, float p, bool train) -> Tensor
feature_alpha_dropout(Tensor input, float p, bool train) -> Tensor
feature_dropout(Tensor input, float p, bool train) -> Tensor
rrelu(Tensor self, Scalar lower=0.125, Scalar upper=0.3333333333333333, bool training=False, Generator?
  generator=None) -> Tensor
""",
    cost="random",
    shape="same",
    random=True,
    also_aliases=(0,),
)

_OURS = family(
    "dropout(Tensor input, float p, bool train) -> Tensor",
    cost="random",
    shape="same",
    namespace="fusion",
    random=True,
    also_aliases=(0,),  # with p = 0 or outside training the result is the input itself
)

# Arithmetic on integers that follow from the batch size.
_INTEGERS = family(
    """
add(int a, int b) -> int
floordiv(int a, int b) -> int
max(int a, int b) -> int
min(int a, int b) -> int
mod(int a, int b) -> int
mul(int a, int b) -> int
neg(int a) -> int
sub(int a, int b) -> int
""",
    cost="view",
    namespace="python",
)

OPERATORS: tuple[OperatorInfo, ...] = (
    *_LINEAR,
    *_MATMUL,
    *_MM,
    *_ADDMM,
    *_EINSUM,
    *_TENSORDOT,
    *_BILINEAR,
    *_CDIST,
    *_CONV,
    *_CONV_TRANSPOSE,
    *_ATTENTION,
    *_RECURRENT,
    *_CELLS,
    *_NORMS,
    *_NORMS_WITH_STATISTICS,
    *_WEIGHT_NORM,
    *_LOSSES,
    *_SPECIAL,
    *_POOLS,
    *_ADAPTIVE_POOLS,
    *_BAGS,
    *_INTERPOLATION,
    *_GRIDS,
    *_DROPOUTS,
    *_OURS,
    *_INTEGERS,
)
