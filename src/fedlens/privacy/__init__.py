"""Mechanisms, what they cost, and what is said about them in privacy.json."""

from .accounting import Release, rdp, rdp_epsilon, total_epsilon
from .gaussian import analytic_sigma, classic_sigma, gaussian_delta, gaussian_epsilon, metric_delta, metric_sigma
from .randomised_response import flip_rate, randomised_response, whole_mask_epsilon
from .statement import Statement

__all__ = [
    "Release",
    "Statement",
    "analytic_sigma",
    "classic_sigma",
    "flip_rate",
    "gaussian_delta",
    "gaussian_epsilon",
    "metric_delta",
    "metric_sigma",
    "randomised_response",
    "rdp",
    "rdp_epsilon",
    "total_epsilon",
    "whole_mask_epsilon",
]
