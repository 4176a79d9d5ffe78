"""Spaces so small that nothing needs sampling: exact likelihoods, exact bounds.

A denoiser here is any function from noisy texts to distributions over clean tokens, one
distribution per place. From it and a forward process follow a reverse chain, whose
likelihood is a product of matrices over all M**S texts, and its evidence lower bound
(ELBO), a sum over the same texts. So the theory can be checked to the last digit.

Leaves out: everything that scales. A text of 4 tokens with 4 states is 256 texts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dflash_lab.diffusion.forward import Process
from dflash_lab.errors import DFlashLabError

# (N, S) noisy ids -> (N, S, M) distributions over clean tokens.
Denoiser = Callable[[Tensor], Tensor]

MOST_TEXTS = 4096


def all_texts(size: int, length: int) -> Tensor:
    """(M**S, S) every text; its row number is the text read as a number in base M."""
    if size**length > MOST_TEXTS:
        raise DFlashLabError(
            f"{size} states and {length} tokens make {size**length} texts; the limit "
            f"is {MOST_TEXTS}, take fewer of either"
        )
    return torch.tensor(list(itertools.product(range(size), repeat=length)))


def _product(probs: Tensor, texts: Tensor) -> Tensor:
    """(N, S, M) distributions of independent places -> (N, M**S) chances of texts."""
    found = torch.ones(len(probs), len(texts), dtype=probs.dtype)
    for place in range(texts.shape[1]):
        found = found * probs[:, place, texts[:, place]]
    return found


def reverse_kernels(
    process: Process, denoiser: Denoiser, length: int, alphas: Sequence[float]
) -> list[Tensor]:
    """Every step of the reverse chain, as a matrix over whole texts.

    Args:
        process: the forward process.
        denoiser: distributions over clean tokens.
        length: tokens S of a text.
        alphas: shares of clean tokens on the time grid, from 1 down to 0.

    Returns:
        One (M**S, M**S) float64 matrix per step, the first from noise; rows are the
        noisier text, columns the cleaner one.
    """
    texts = all_texts(process.size, length)
    clean = denoiser(texts).double()  # (N, S, M) over x_0
    kernels = []
    for later in range(len(alphas) - 1, 0, -1):
        posterior = process.posterior(alphas[later - 1], alphas[later])
        # p(x_s | x_t) = sum over x_0 of p(x_0 | x_t) q(x_s | x_t, x_0), for each place
        pairs = posterior[:, texts]  # (x_0, N, S, x_s)
        probs = torch.einsum("nsx,xnsy->nsy", clean, pairs)
        # Where the denoiser bets on texts that cannot have led here, share the rest.
        probs = probs / probs.sum(-1, keepdim=True).clamp(min=1e-300)
        kernels.append(_product(probs, texts))
    return kernels


def exact_law(process: Process, kernels: Sequence[Tensor], length: int) -> Tensor:
    """(M**S,) chances with which the reverse chain writes each text."""
    texts = all_texts(process.size, length)
    probs = _product(process.noise(torch.float64).expand(1, length, -1), texts)[0]
    for kernel in kernels:
        probs = probs @ kernel
    return probs


def exact_elbo(
    process: Process,
    kernels: Sequence[Tensor],
    text: Sequence[int],
    alphas: Sequence[float],
) -> float:
    """Lower bound on log p(text), by summing over all noisy texts.

    Minus the ELBO is KL(q(x_T | x_0) || noise) plus, for each step, the mean over noisy
    texts of KL(q(x_s | x_t, x_0) || p(x_s | x_t)). At the last step q is certain, and
    the divergence is -log p(x_0 | x_t).

    Returns:
        Nats; -inf if the chain cannot write what it must.
    """
    length = len(text)
    texts = all_texts(process.size, length)
    start = torch.tensor(text)
    prior = _product(process.noise(torch.float64).expand(1, length, -1), texts)[0]
    last = process.matrix(alphas[-1])[start]  # (S, M)
    loss = _kl(_product(last[None], texts)[0], prior)
    for kernel, later in zip(kernels, range(len(alphas) - 1, 0, -1), strict=True):
        noisy = _product(process.matrix(alphas[later])[start][None], texts)[0]
        posterior = process.posterior(alphas[later - 1], alphas[later])
        places = posterior[start[None, :], texts]  # (N, S, x_s)
        truth = _product(places, texts)
        for row in torch.nonzero(noisy).flatten().tolist():
            loss = loss + noisy[row] * _kl(truth[row], kernel[row])
    return -float(loss)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    there = first > 0
    return (first[there] * (first[there] / second[there]).log()).sum()


def masked_elbo(denoiser: Denoiser, text: Sequence[int], mask_token_id: int) -> float:
    """The bound of masked diffusion in continuous time, exactly.

    A set of m masked places out of S has the weight (m-1)! (S-m)! / S!: the integral
    over t of -alpha'/(1-alpha) (1-alpha)**m alpha**(S-m). The schedule has dropped out,
    so every schedule gives the same bound. This is also the mean over all orders in
    which tokens can be written one by one.

    Returns:
        Nats.
    """
    length = len(text)
    clean = torch.tensor(text)
    total = 0.0
    for pattern in itertools.product((False, True), repeat=length):
        hidden = torch.tensor(pattern)
        m = int(hidden.sum())
        if m == 0:
            continue
        weight = math.factorial(m - 1) * math.factorial(length - m)
        noisy = torch.where(hidden, mask_token_id, clean)
        probs = denoiser(noisy[None])[0].double()  # (S, M)
        chosen = probs[torch.arange(length), clean][hidden]
        total += weight / math.factorial(length) * float(chosen.log().sum())
    return total


def ideal_denoiser(
    probs: Tensor, size: int, length: int, mask_token_id: int
) -> Denoiser:
    """The best possible denoiser of masked texts, for a known distribution over texts.

    Args:
        distribution: (M**S,) chances of all texts; texts with a mask have none.
        size: states M.
        length: tokens S.
        mask_token_id: the mask's state.

    Returns:
        A denoiser that gives, for each place, the distribution of its token given all
        tokens that are not masked.
    """
    texts = all_texts(size, length)

    def denoise(noisy: Tensor) -> Tensor:
        fits = (noisy[:, None] == texts) | (noisy[:, None] == mask_token_id)
        weights = fits.all(-1) * probs.double()  # (N, M**S)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
        tokens = torch.nn.functional.one_hot(texts, size).double()  # (M**S, S, M)
        return torch.einsum("nt,tsm->nsm", weights, tokens)

    return denoise
