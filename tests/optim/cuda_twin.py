"""torch's CUDA optimizers in numpy, one operation after another: the slow twin of the native kernels.

Contractions into FMA are written out. numpy has none, so they are made of exact steps: a product of two float32 is
exact in float64, and a sum rounded to odd there rounds to the right float32 (Boldo and Melquiond, "Emulation of FMA
and correctly rounded sums: proved algorithms using rounding to odd", 2008).
"""

import ctypes
import ctypes.util

import numpy as np

F, D = np.float32, np.float64
_libm = ctypes.CDLL(ctypes.util.find_library("m"))
_libm.fma.restype = ctypes.c_double
_libm.fma.argtypes = [ctypes.c_double] * 3
_fma_double = np.frompyfunc(lambda a, b, c: _libm.fma(a, b, c), 3, 1)


def fma(a, b, c, real=F):
    """a * b + c, rounded once, in float32 or float64."""
    a, b, c = np.broadcast_arrays(real(a), real(b), real(c))
    if real is D:
        return _fma_double(a, b, c).astype(D)
    product, c = a.astype(D) * b.astype(D), c.astype(D)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = np.atleast_1d(total).view(np.int64).copy()
    even = np.atleast_1d((error != 0) & np.isfinite(total)) & ((bits & 1) == 0)
    outward = np.atleast_1d((error > 0) == (total > 0))
    return np.where(even, np.where(outward, bits + 1, bits - 1), bits).view(D).astype(F).reshape(total.shape)


def rounded_to(dtype):
    """The function that rounds to `dtype` and gives the value back in its working precision."""
    if dtype == "float64":
        return lambda x: np.asarray(x, dtype=D)
    if dtype == "float32":
        return lambda x: np.asarray(x, dtype=F)
    if dtype == "float16":
        return lambda x: np.asarray(x, dtype=F).astype(np.float16).astype(F)

    def bfloat16(x):
        bits = np.asarray(x, dtype=F).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(F)

    return bfloat16


class _Twin:
    """`case` gives the numbers (cuda_cases.Case); `lanes` as in OptimizerSpec; `power(beta, t)` the device's powers."""

    def __init__(self, param, case, lanes=0xFF, power=None):
        self.case, self.lanes, self.power = case, lanes, power
        self.real = D if case.dtype == "float64" else F
        self.r = rounded_to(case.dtype)
        self.p = self.r(param)
        self.step = case.first_step

    def prepared(self, grad):
        g = self.r(grad)
        if self.case.grad_scale:
            g = g / self.real(F(self.case.grad_scale))
        return -g if self.case.maximize else g

    def by_lanes(self, a, b, c):
        """a * b + c, contracted for the elements that `lanes` says."""
        index = np.arange(c.size).reshape(c.shape)
        aligned = c.size % 4 == 0 and not self.case.misaligned
        lane = index % 4 if aligned else index // 512 % 4
        mask = (self.lanes if aligned else self.lanes >> 4) >> lane & 1
        return np.where(mask, fma(a, b, c, self.real), self.real(a) * b + c)


class AdamTwin(_Twin):
    """Adam or AdamW over one parameter as CUDA's foreach, single or fused kernels step it."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.m, self.v, self.vmax = (np.zeros_like(self.p) for _ in range(3))

    def update(self, grad, lr):
        with np.errstate(all="ignore"):
            self.step += 1
            update = self.in_one if self.case.implementation == "fused" else self.by_kernels
            update(self.prepared(grad), lr)

    def by_kernels(self, g, lr):
        c, real, r = self.case, self.real, self.r
        beta1, beta2 = c.betas
        if c.weight_decay:
            if c.kind == "adamw":
                self.p = r(self.p * real(1 - lr * c.weight_decay))
            else:
                g = r(fma(real(c.weight_decay), self.p, g, real))
        w = real(1 - beta1)
        if abs(w) < 0.5:
            self.m = r(fma(w, g - self.m, self.m, real))
        else:
            self.m = r(fma(-(g - self.m), real(1) - w, g, real))
        self.v = r(self.v * real(beta2))
        self.v = r(fma(real(1 - beta2), g * g, self.v, real))
        v = self.v
        if c.amsgrad:
            v = self.vmax = np.maximum(self.vmax, self.v)
        root = r(np.sqrt(v))
        step_size = lr / (1 - beta1**self.step) * -1
        correction = (1 - beta2**self.step) ** 0.5
        denom = r(root / real(correction)) if c.implementation == "foreach" else r(root * real(1 / correction))
        denom = r(denom + real(c.eps))
        self.p = r(fma(real(step_size), self.m / denom, self.p, real))

    def in_one(self, g, lr):
        c, real, r = self.case, self.real, self.r
        beta1, beta2 = c.betas
        lr = F(lr) if c.tensor_lr else lr
        lr, wd, eps, b1, b2 = (real(x) for x in (lr, c.weight_decay, c.eps, beta1, beta2))
        p, m, v = self.p, self.m, self.v
        if c.weight_decay:
            if c.kind == "adamw":
                p = fma(-(lr * wd), p, p, real)
            else:
                g = self.by_lanes(wd, p, g)
        m = fma(b1, m, fma(-b1, g, g, real), real)
        square = g * g
        v = fma(b2, v, fma(-b2, square, square, real), real)
        step_size = lr / (real(1) - real(self.power(beta1, self.step)))
        correction = np.sqrt(real(1) - real(self.power(beta2, self.step)))
        root = v
        if c.amsgrad:
            root = np.maximum(self.vmax, v)
            self.vmax = r(root)
        denom = np.sqrt(root) / correction + eps
        self.p, self.m, self.v = r(p - step_size * m / denom), r(m), r(v)


class SgdTwin(_Twin):
    """SGD over one parameter: the fused kernel rounds to the parameter's dtype only where it stores."""

    buffer = None

    def update(self, grad, lr):
        c, real = self.case, self.real
        between = real if c.implementation == "fused" else self.r
        with np.errstate(all="ignore"):
            g = self.prepared(grad)
            if c.weight_decay:
                g = between(fma(real(c.weight_decay), self.p, g, real))
            if c.momentum:
                new = g
                if self.buffer is not None:
                    new = between(fma(real(1 - c.dampening), g, between(self.buffer * real(c.momentum)), real))
                g = between(fma(real(c.momentum), new, g, real)) if c.nesterov else new
                self.buffer = self.r(new)
            self.p = self.r(self.by_lanes(real(-lr), g, self.p))
