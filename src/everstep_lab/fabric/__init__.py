"""Planned traffic studied: steps in virtual time, what others do, pictures, plans for queue pairs."""
