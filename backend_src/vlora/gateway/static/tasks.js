// Names and labels of the server's tasks. The server puts the question into the task's template.

const TASKS = {
  vqa: { name: "Answer a question", label: "Question", hint: "What color is the star?" },
  caption: { name: "Describe the picture", label: "Instruction (optional)", hint: "" },
  refer: { name: "Find one thing", label: "Thing to find", hint: "red circle" },
  detect: { name: "Find all of a kind", label: "Things to find", hint: "circle" },
  classify: { name: "Name the category", label: "Instruction (optional)", hint: "" },
  video: { name: "Name the action", label: "Instruction (optional)", hint: "" },
  raw: { name: "Continue a prompt", label: "Prompt, without a template", hint: "" },
};
const DEFAULT = "vqa";

/** Return {name, label, hint} of a task; those of an unknown one show its own name. */
export const taskOf = (task) => TASKS[task] ?? { name: task, label: "Text", hint: "" };

/** Return the tasks of a model that a single message can ask for. */
export const tasksOf = (model) => model.tasks.filter((task) => task !== "chat");

/** Return the task that the server chooses for a request without one. */
export function automaticTask(model) {
  return model?.parent && model.tasks.length === 1 ? model.tasks[0] : DEFAULT;
}
