"""The dashboards; `write.py` turns them into Grafana's JSON and the README's tables."""

from pages.cost import COST
from pages.failures import FAILURES
from pages.fleet import FLEET
from pages.nodes import NODES
from pages.panel import Dashboard, Panel
from pages.pipeline import PIPELINE

DASHBOARDS = (FLEET, COST, PIPELINE, NODES, FAILURES)

__all__ = ["DASHBOARDS", "Dashboard", "Panel"]
