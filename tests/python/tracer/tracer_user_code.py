# SPDX-License-Identifier: Apache-2.0
"""Builders as people write them for a GPU, and models that read values of tensors."""

import copy

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.inner, self.out = nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 64, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(16))

    def forward(self, ids):
        return self.out(torch.relu(self.inner(self.embed(ids))) * self.scale)


def as_it_is():
    return Net()


def to_cuda():
    return Net().to("cuda")


def to_device_and_dtype():
    return Net().to("cuda", torch.bfloat16)


def to_device_0():
    torch.manual_seed(0)
    torch.cuda.set_device(0)
    return Net().to(torch.device("cuda", torch.cuda.current_device()))


def to_another_device():
    return Net().to("cuda:1")


def cuda():
    return Net().cuda()


def cuda_inputs():
    return Net().cuda(), (torch.zeros(2, 8, dtype=torch.long).cuda(),)


def deepcopied():
    net = Net()
    return copy.deepcopy(net)


class TrainsACopy(nn.Module):
    """The module that trains is a copy of the one that stays frozen, as with peft's modules_to_save. Each forward makes
    another, which it drops."""

    def __init__(self):
        super().__init__()
        self.saved = Net().inner.requires_grad_(False)
        self.trained = copy.deepcopy(self.saved).requires_grad_(True)
        modes = {parameter.fake_mode for parameter in self.parameters()}
        assert len(modes) == 1, f"{len(modes)} modes"

    def forward(self, x):
        with torch.no_grad():
            teacher = copy.deepcopy(self.trained)(x)
        return self.trained(x) - teacher


def trains_a_copy():
    return TrainsACopy(), (torch.zeros(2, 16),)


def lora_with_modules_to_save():
    import peft
    import transformers

    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    }
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)


def half():
    return Net().half()


def bfloat16():
    return Net().bfloat16()


def to_cpu():
    return Net().to("cpu")


def on_the_cpu():
    with torch.device("cpu"):
        return Net()


def on_meta():
    with torch.device("meta"):
        return Net()


def to_empty():
    with torch.device("meta"):
        net = Net()
    return net.to_empty(device="cuda")


def where_there_is_one():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Net().to(device), (torch.zeros(2, 8, dtype=torch.long, device=device),)


def compiled():
    return torch.compile(Net())


def filled():
    net = Net()
    with torch.no_grad():
        net.inner.weight.copy_(torch.randn(16, 16))
        nn.init.orthogonal_(net.inner.weight)
    net.load_state_dict({name: torch.zeros_like(value) for name, value in net.state_dict().items()})
    return net


def reads_and_moves():
    """It has to be built on real tensors."""
    return Net().cuda() if torch.linspace(0, 1, 3)[1].item() > 0 else None


def from_config():
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=1, vocab_size=128
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model.to_empty(device="cuda").to(torch.bfloat16)


def from_pretrained():
    """From a folder that has a config and no weights."""
    import tempfile

    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=1, vocab_size=128,
        architectures=["LlamaForCausalLM"],
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().train()


# ---- values ----


class Read(nn.Module):
    """`how`: what is read of the linear layer's output."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how

    def forward(self, x):
        return self.how(self.linear(x))


class Around(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner, self.out = Read(how), nn.Linear(8, 8)

    def forward(self, x):
        return self.out(self.inner(x))


def doubled_if_positive(y):
    if y.sum().item() > 0:  # the line that reads
        y = y * 2
    return y


def item():
    return Around(doubled_if_positive), (torch.zeros(4, 8),)


def condition():
    return Around(lambda y: y * 2 if (y > 0).any() else y), (torch.zeros(4, 8),)


def mask():
    return Around(lambda y: y[y.sum(-1) > 0]), (torch.zeros(4, 8),)


def found():
    return Around(lambda y: y[torch.nonzero(y[:, 0]).squeeze(-1)]), (torch.zeros(4, 8),)


def selected():
    return Around(lambda y: y * y.masked_select(y > 0).sum()), (torch.zeros(4, 8),)


def sizes():
    return Around(lambda y: torch.cat(y.split(y[:, 0].long().tolist()))), (torch.zeros(4, 8),)


def as_numpy():
    return Around(lambda y: y * float(y.detach().cpu().numpy().mean())), (torch.zeros(4, 8),)


def in_loss():
    return nn.Linear(8, 8), (torch.zeros(4, 8),), lambda out: out.sum() if out.sum() > 0 else -out.sum()


# ---- labels that a loss makes or holds on the CPU ----


def _cross_entropy(make_labels):
    return nn.Linear(8, 5), (torch.zeros(4, 8),), lambda out: nn.functional.cross_entropy(out, make_labels())


LABELS = torch.arange(4)  # made when the module is imported: a real tensor


def labels_on_the_device():
    labels = torch.zeros(4, dtype=torch.long)
    return _cross_entropy(lambda: labels)


def labels_made_in_the_loss():
    return _cross_entropy(lambda: torch.randint(0, 5, (4,)))


def labels_of_the_module():
    return _cross_entropy(lambda: LABELS)


def labels_said_to_be_on_the_cpu():
    labels = torch.zeros(4, dtype=torch.long, device="cpu")
    return _cross_entropy(lambda: labels)


def labels_compared():
    return (
        nn.Linear(8, 5),
        (torch.zeros(4, 8),),
        lambda out: ((out - torch.rand(4, 5)) * torch.tensor(0.5)).square().mean(),
    )


def stand_in():
    model = Around(doubled_if_positive)
    model.inner.how = lambda y: y * 2
    return model, (torch.zeros(4, 8),)


# ---- recurrent layers ----


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.recurrent = kind(8, 16, num_layers=2, batch_first=True, **options)
        self.out = nn.Linear(self.width(options), 4)

    @staticmethod
    def width(options):
        return (options.get("proj_size") or 16) * (2 if options.get("bidirectional") else 1)

    def forward(self, x):
        return self.out(self.recurrent(x)[0])


def lstm():
    return Recurrent(nn.LSTM), (torch.zeros(3, 5, 8),)


def gru():
    return Recurrent(nn.GRU), (torch.zeros(3, 5, 8),)


def rnn():
    return Recurrent(nn.RNN), (torch.zeros(3, 5, 8),)


def lstm_with_everything():
    return Recurrent(nn.LSTM, bidirectional=True, dropout=0.1, proj_size=4), (torch.zeros(3, 5, 8),)


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(8, 16), nn.GRUCell(16, 16), nn.RNNCell(16, 4)

    def forward(self, x):
        return self.rnn(self.gru(self.lstm(x)[0]))


def cells():
    return Cells(), (torch.zeros(3, 8),)
