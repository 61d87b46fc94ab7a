"""What the desk is asked and what it answers."""

from pydantic import BaseModel, Field


class Question(BaseModel):
    text: str = Field(description="What is asked.")
    drafts: int = Field(default=2, ge=1, description="How many answers are drafted.")


class Draft(BaseModel):
    text: str
    score: float
    turn_id: str


class Reply(BaseModel):
    text: str
    words: list[str] = Field(default_factory=list)
    steps_heard: int = 0
    asked_by: str = ""


def question_from_text(text: str) -> Question:
    return Question(text=text)


def text_of_reply(reply: Reply) -> str:
    return reply.text
