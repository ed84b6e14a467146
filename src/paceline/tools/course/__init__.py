"""The course: twelve lessons for one laptop, and checks that run a person's own file on real ranks."""
