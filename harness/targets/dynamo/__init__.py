"""The system `dynamo`: NVIDIA Dynamo's own front end, and its mocker workers in the place of engines."""
