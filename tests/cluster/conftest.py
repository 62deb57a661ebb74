"""What tests of probes share."""

from tests.support.graphs import remember_captures

remember_captures()
