"""The layer of Qwen3-Next, against transformers', document by document."""

import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from penstock.models.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from penstock_kernels.attention import VarlenMetadata


def test_outputs_and_gradients_of_packed_documents_are_those_of_transformers():
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        hidden_size=24,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        linear_conv_kernel_dim=4,
    )
    theirs = Qwen3NextGatedDeltaNet(config, 0)
    # Of strong decays, transformers' own gradient is 1e-5 off.
    theirs.A_log.data.uniform_(-4, 0)
    ours = GatedDeltaNet(GatedDeltaNetConfig(24, 2, 4, 8, 6, 4, config.rms_norm_eps))
    ours.load_state_dict(theirs.state_dict())
    lengths = (70, 3, 33)
    x, slope = torch.randn(sum(lengths), 24), torch.randn(sum(lengths), 24)
    mine, other = (x.clone().requires_grad_() for _ in range(2))
    y = ours(mine, VarlenMetadata.of(lengths))
    want = torch.cat([theirs(one[None])[0] for one in other.split(lengths)])
    y.backward(slope)
    want.backward(slope)
    gradients = dict(theirs.named_parameters())
    pairs = [(y, want), (mine.grad, other.grad)]
    pairs += [(p.grad, gradients[name].grad) for name, p in ours.named_parameters()]
    for one, exact in pairs:
        assert one is not None
        assert exact is not None
        assert (one - exact).norm() <= 1e-5 * exact.norm()
