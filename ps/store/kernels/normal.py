"""Constants of Acklam's rational approximation of the normal quantile function (relative error below 1.2e-9).

It uses only additions, multiplications, divisions and square roots in a fixed order, so that both kernels give the same
bits on all machines; a C library's logarithm would not.
"""

from __future__ import annotations

A = (-3.969683028665376e1, 2.209460984245205e2, -2.759285104469687e2, 1.383577518672690e2, -3.066479806614716e1,
     2.506628277459239)  # fmt: skip
B = (-5.447609879822406e1, 1.615858368580409e2, -1.556989798598866e2, 6.680131188771972e1, -1.328068155288572e1)
C = (-7.784894002430293e-3, -3.223964580411365e-1, -2.400758277161838, -2.549732539343734, 4.374664141464968,
     2.938163982698783)  # fmt: skip
D = (7.784695709041462e-3, 3.224671290700398e-1, 2.445134137142996, 3.754408661907416)
TAIL = 0.02425
"""The tail formula applies below this probability and above one minus it."""
LN2 = 0.6931471805599453
UNIT = 2.0**-32
