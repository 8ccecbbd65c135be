"""Inputs that are neither one tensor nor a dict of some: packed sequences, states carried on, graphs."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATConv, GCNConv, global_mean_pool

from tests.programs.loops import Program, alone, close, shard, together

original = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])


class Tagger(nn.Module):
    """Tags each word of sentences of different lengths."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 12)
        self.lstm = nn.LSTM(12, 10, num_layers=2, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(20, 5)

    def forward(self, words):
        embedded = words._replace(data=self.embedding(words.data))
        packed, _ = self.lstm(embedded)
        return packed._replace(data=self.head(packed.data))


def sentences(generator):
    lengths = torch.randint(1, 9, (4,), generator=generator).tolist()
    words = [torch.randint(40, (length,), generator=generator) for length in lengths]
    tags = [torch.randint(5, (length,), generator=generator) for length in lengths]
    return pack_sequence(words, enforce_sorted=False), pack_sequence(tags, enforce_sorted=False)


def tag_loss(model, batch):
    words, tags = batch
    scores, lengths = pad_packed_sequence(model(words))
    expected, _ = pad_packed_sequence(tags, padding_value=-100)
    assert len(lengths) == 4
    return nn.functional.cross_entropy(scores.flatten(0, 1), expected.flatten())


class WordModel(nn.Module):
    """In the manner of pytorch/examples: the state goes from piece to piece of a text; embedding and head are tied."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(40, 12)
        self.rnn = nn.GRU(12, 12, 2, dropout=0.2)
        self.decoder = nn.Linear(12, 40)
        self.decoder.weight = self.encoder.weight

    def forward(self, words, state):
        output, state = self.rnn(self.drop(self.encoder(words)), state)
        return nn.functional.log_softmax(self.decoder(self.drop(output)).view(-1, 40), dim=1), state


def word_loss(model, text):
    state, total = torch.zeros(2, 3, 12), 0.0
    for start in range(0, 9, 3):
        state = state.detach()
        scores, state = model(text[start : start + 3], state)
        total = total + nn.functional.nll_loss(scores, text[start + 1 : start + 4].flatten())
    return total


class Convolution(nn.Module):
    def __init__(self, kind, width):
        super().__init__()
        self.conv, self.norm = kind(width, 12), nn.LayerNorm(12)

    def forward(self, x, edges):
        return torch.relu(self.norm(self.conv(x, edges)))


class GraphNet(nn.Module):
    """Takes a whole graph, as torch_geometric's examples do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Convolution(GCNConv, 6), Convolution(GATConv, 12)])
        self.head = nn.Linear(12, 3)

    def forward(self, data):
        x = data.x
        for layer in self.layers:
            x = layer(x, data.edge_index)
        x = nn.functional.dropout(x, p=0.5, training=self.training)
        return self.head(global_mean_pool(x, data.batch))


def graphs(generator):
    made = []
    for _ in range(3):
        nodes = int(torch.randint(3, 8, (1,), generator=generator))
        edges = torch.randint(nodes, (2, 2 * nodes), generator=generator)
        label = torch.randint(3, (1,), generator=generator)
        made.append(Data(x=torch.randn(nodes, 6, generator=generator), edge_index=edges, y=label))
    return Batch.from_data_list(made)


def graph_loss(model, data):
    return nn.functional.cross_entropy(model(data), data.y)


PROGRAMS = {
    "packed": Program(Tagger, sentences, ("LSTM",), tag_loss),
    "carried on": Program(WordModel, lambda generator: torch.randint(40, (10, 3), generator=generator), (), word_loss),
    "graphs": Program(GraphNet, graphs, ("Convolution",), graph_loss),
}


@functools.cache
def expected(program, ranks):
    return alone(program, ranks)


@original
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_trains_as_one_process(world, program, original):
    got = together(program, world, shard(program, use_orig_params=original))
    close(got, expected(program, world.size))
