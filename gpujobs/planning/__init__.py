"""From a profile and a site to batch scripts. Pure: no process, no clock, no network."""
