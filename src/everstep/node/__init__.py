"""What happens on one machine: starts workers, watches them, reports."""
