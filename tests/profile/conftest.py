"""What tests of profiles share."""

from tests.support.graphs import remember_captures

remember_captures()
