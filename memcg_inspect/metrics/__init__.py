# SPDX-License-Identifier: LGPL-2.1-or-later
"""Figures of an audit for Prometheus: the textfile format of the node exporter, and OpenMetrics."""
