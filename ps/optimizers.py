"""Optimizers and initializers by the names that scripts use; each returns a part of a table's definition."""

from __future__ import annotations

from ps.spec import Initial, InitMethod, Optimizer, UpdateRule

# Names and defaults are the frameworks'; for rows of tables the rules of ``ps.spec`` apply.


def SGD(lr: float = 0.01, *, weight_decay: float = 0.0, clip_value: float = 0.0, clip_norm: float = 0.0) -> Optimizer:
    """Stochastic gradient descent without momentum."""
    return Optimizer(UpdateRule.SGD, lr, weight_decay=weight_decay, clip_value=clip_value, clip_norm=clip_norm)


def Momentum(
    lr: float = 0.01,
    momentum: float = 0.9,
    *,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    clip_value: float = 0.0,
    clip_norm: float = 0.0,
) -> Optimizer:
    """SGD with momentum. A sparse row's velocity is only updated when the row gets a gradient."""
    return Optimizer(
        UpdateRule.MOMENTUM,
        lr,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        clip_value=clip_value,
        clip_norm=clip_norm,
    )


def Adagrad(
    lr: float = 0.01,
    *,
    initial_accumulator: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    clip_value: float = 0.0,
    clip_norm: float = 0.0,
) -> Optimizer:
    """Adagrad, with one sum of squares per weight. Gradients of a batch mean are small: with ``initial_accumulator=0``
    the first step of each row has length ``lr``, however small its gradient."""
    return Optimizer(
        UpdateRule.ADAGRAD,
        lr,
        eps=eps,
        initial_accumulator=initial_accumulator,
        weight_decay=weight_decay,
        clip_value=clip_value,
        clip_norm=clip_norm,
    )


def RowAdagrad(
    lr: float = 0.01,
    *,
    initial_accumulator: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    clip_value: float = 0.0,
    clip_norm: float = 0.0,
) -> Optimizer:
    """Adagrad with one sum of squares per row: almost no memory besides the weights. Sparse tables only."""
    return Optimizer(
        UpdateRule.ROW_ADAGRAD,
        lr,
        eps=eps,
        initial_accumulator=initial_accumulator,
        weight_decay=weight_decay,
        clip_value=clip_value,
        clip_norm=clip_norm,
    )


def Adam(
    lr: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    *,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip_value: float = 0.0,
    clip_norm: float = 0.0,
) -> Optimizer:
    """Lazy Adam: a row's moments are only updated when it gets a gradient. For rows that get one in every step, such as
    dense parameters, it is ordinary Adam."""
    return Optimizer(
        UpdateRule.ADAM,
        lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        clip_value=clip_value,
        clip_norm=clip_norm,
    )


def Ftrl(
    lr: float = 0.1, *, l1: float = 0.0, l2: float = 0.0, lr_power: float = -0.5, initial_accumulator: float = 0.1
) -> Optimizer:
    """FTRL-Proximal; ``l1`` makes weights exactly 0. Use it with ``Zeros()`` as the initializer."""
    return Optimizer(UpdateRule.FTRL, lr, l1=l1, l2=l2, lr_power=lr_power, initial_accumulator=initial_accumulator)


def Uniform(scale: float = 0.01, seed: int = 0) -> Initial:
    """Uniform in ``-scale .. scale``."""
    return Initial(InitMethod.UNIFORM, scale, seed)


def Normal(scale: float = 0.01, seed: int = 0) -> Initial:
    """Normal with mean 0 and standard deviation ``scale``."""
    return Initial(InitMethod.NORMAL, scale, seed)


def Constant(value: float) -> Initial:
    """All weights equal to ``value``."""
    return Initial(InitMethod.CONSTANT, value)


def Zeros() -> Initial:
    """Initial weights: all 0."""
    return Initial(InitMethod.ZEROS, 0.0)
