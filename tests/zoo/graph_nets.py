"""Graphs, point clouds and molecules: message passing with index_add, scatter, gather and dense adjacency."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .entry import CLASSES, Batch, Entry, both, classes, features, values

_FEATURES = 6
_FOR_EACH_NODE: dict[str, Any] = {"x": {0: "nodes"}, "edges": {1: "edges"}, "labels": {0: "nodes"}}


def _graph(size: int, length: int) -> Batch:
    """`size` times four nodes, and edges between them."""
    nodes = 4 * size
    return {"x": torch.randn(nodes, _FEATURES), "edges": torch.randint(0, nodes, (2, 3 * nodes))}


def _node_labels(size: int, length: int) -> Batch:
    return {"labels": torch.randint(0, CLASSES, (4 * size,))}


class GCN(nn.Module):
    """Graph convolution with symmetric normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_FEATURES, 12), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges[0], edges[1]
        degree = x.new_ones(x.shape[0]).index_add(0, target, x.new_ones(target.shape[0]))
        weight = (degree[source] * degree[target]).rsqrt()[:, None]

        def spread(value: torch.Tensor) -> torch.Tensor:
            return value / degree[:, None] + torch.zeros_like(value).index_add(0, target, value[source] * weight)

        return spread(self.second(F.relu(spread(self.first(x)))))


class GAT(nn.Module):
    """Graph attention: a softmax over each node's neighbours, by scatter_reduce and scatter_add."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.score, self.head = nn.Linear(_FEATURES, 8), nn.Linear(16, 1), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges[0], edges[1]
        seen = self.project(x)
        score = F.leaky_relu(self.score(torch.cat([seen[source], seen[target]], -1)), 0.2).squeeze(-1)
        highest = torch.full((x.shape[0],), -1e9, dtype=x.dtype).scatter_reduce(0, target, score.detach(), "amax")
        weight = torch.exp(score - highest[target])
        total = torch.zeros(x.shape[0], dtype=x.dtype).scatter_add(0, target, weight)
        messages = seen[source] * (weight / (total[target] + 1e-9))[:, None]
        return self.head(F.elu(torch.zeros_like(seen).index_add(0, target, messages)))


class SAGE(nn.Module):
    """GraphSAGE with the mean of the neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(_FEATURES, CLASSES), nn.Linear(_FEATURES, CLASSES, bias=False)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        target = edges[1][:, None].expand(-1, x.shape[1])
        total = torch.zeros_like(x).scatter_add_(0, target, x[edges[0]])
        count = torch.zeros_like(x).scatter_add_(0, target, torch.ones_like(x[edges[0]]))
        return self.own(x) + self.others(total / count.clamp(min=1))


class GIN(nn.Module):
    """Whole graphs, given as dense adjacency: batch x nodes x nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.epsilon = nn.Parameter(torch.zeros(2))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(_FEATURES, 10), nn.ReLU(), nn.Linear(10, _FEATURES)) for _ in range(2))
        self.head = nn.Linear(_FEATURES, CLASSES)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = layer((1 + self.epsilon[place]) * x + adjacency @ x)
        return self.head(x.sum(1))


class PointNet(nn.Module):
    """Points: shared layers, a learned transform, a maximum over all points."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(8, 9))
        self.body, self.head = nn.Sequential(nn.Conv1d(3, 12, 1, bias=False), nn.BatchNorm1d(12), nn.ReLU()), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turn = self.transform(x).view(-1, 3, 3) + torch.eye(3, dtype=x.dtype)
        return self.head(self.body(torch.bmm(turn, x)).max(2).values)


class EdgeConv(nn.Module):
    """DGCNN: the nearest neighbours of each point by cdist and topk, gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.edge, self.head = nn.Sequential(nn.Linear(6, 10), nn.LeakyReLU(0.2)), nn.Linear(10, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x, x).topk(4, dim=2, largest=False).indices
        near = torch.gather(x.unsqueeze(1).expand(-1, x.shape[1], -1, -1), 2, nearest[..., None].expand(-1, -1, -1, 3))
        own = x.unsqueeze(2).expand_as(near)
        return self.head(self.edge(torch.cat([own, near - own], -1)).amax(2).mean(1))


class SchNet(nn.Module):
    """Molecules: distances through radial functions weight the messages; energies and atoms with padding."""

    centres: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.atoms = nn.Embedding(8, 10, padding_idx=0)
        self.register_buffer("centres", torch.linspace(0, 4, 8))
        self.filters, self.own, self.out = (
            nn.Sequential(nn.Linear(8, 10), nn.Softplus(), nn.Linear(10, 10)),
            nn.Linear(10, 10),
            nn.Linear(10, 1),
        )

    def forward(self, kinds: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        seen, real = self.atoms(kinds), (kinds > 0).to(places.dtype)
        distance = ((places[:, :, None] - places[:, None]).square().sum(-1) + 1e-6).sqrt()
        weights = self.filters(torch.exp(-((distance[..., None] - self.centres) ** 2))) * (real[:, :, None] * real[:, None])[..., None]
        seen = seen + self.own(torch.einsum("bijc,bjc->bic", weights, seen))
        return (self.out(F.softplus(seen)).squeeze(-1) * real).sum(1)


class DeepSets(nn.Module):
    """Sets of different sizes as one row of items with the number of their set."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(_FEATURES, 10), nn.Linear(20, CLASSES)

    def forward(self, x: torch.Tensor, owner: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
        seen = torch.tanh(self.inner(x))
        places = owner[:, None].expand_as(seen)
        total = empty.scatter_reduce(0, places, seen, "sum")
        highest = empty.scatter_reduce(0, places, seen, "amax", include_self=False)
        return self.outer(torch.cat([total, highest], -1))


def _sets(size: int, length: int) -> Batch:
    owner = torch.arange(3 * size) % size
    return {"x": torch.randn(3 * size, _FEATURES), "owner": owner, "empty": torch.zeros(size, 10)}


def _adjacency(size: int, length: int) -> Batch:
    return {"x": torch.randn(size, 5, _FEATURES), "adjacency": (torch.rand(size, 5, 5) > 0.5).float()}


def _molecules(size: int, length: int) -> Batch:
    return {"kinds": torch.randint(0, 8, (size, 6)), "places": torch.randn(size, 6, 3)}


ENTRIES = [
    Entry("gcn_index_add", "graphs", GCN, _graph, _node_labels, dynamic=_FOR_EACH_NODE),
    Entry("gat_scatter", "graphs", GAT, _graph, _node_labels, dynamic=_FOR_EACH_NODE),
    Entry("graphsage_scatter", "graphs", SAGE, _graph, _node_labels, dynamic=_FOR_EACH_NODE),
    Entry("gin_dense", "graphs", GIN, _adjacency, classes()),
    Entry("pointnet", "graphs", PointNet, features(3, 10), classes()),
    Entry("edge_convolution", "graphs", EdgeConv, features(8, 3), classes()),
    Entry("schnet", "graphs", SchNet, _molecules, values(), loss="mse"),
    Entry(
        "deep_sets_scatter_reduce",
        "graphs",
        DeepSets,
        both(_sets),
        classes(),
        dynamic={"x": {0: "items"}, "owner": {0: "items"}, "empty": {0: "sets"}, "labels": {0: "sets"}},
    ),
]
