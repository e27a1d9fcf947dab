// Names and labels of the server's tasks, which the entry of the base model lists.

const DEFAULT = "chat";
let labels = {};

/** Read the names and labels from the list of models. */
export function readTasks(models) {
  labels = models.find(({ parent }) => !parent)?.task_labels ?? {};
}

/** Return {name, label, hint} of a task; those of an unknown one show its own name. */
export const taskOf = (task) => labels[task] ?? { name: task, label: "Text", hint: "" };

/** Return the tasks of a model. */
export const tasksOf = (model) => model.tasks;

/** Return the task that the server chooses for a request without one. */
export function automaticTask(model) {
  return model?.default_task ?? DEFAULT;
}
