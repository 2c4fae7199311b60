"""What is lost while a run goes on and how it comes back; runs that go on where another stopped."""
