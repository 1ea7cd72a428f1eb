"""From what was asked for to the scripts that are sent: pure, no process, no clock, no network."""
