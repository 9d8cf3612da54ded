// What a user may ask of the job: the request, and the words that say beforehand what will happen. Pure.
import { jobPath } from "./api.js";
import { counted } from "./format.js";

const nodesOf = (status) => counted(status.scale.nodes, "node");

/** Asks for a size; the dialog has a field for it. */
export const scale = {
  name: "Scale",
  title: () => "Change the size",
  text: (status) =>
    `The job trains on ${nodesOf(status)}; ${status.scale.minimum} to ${status.scale.maximum} are allowed` +
    `${status.scale.unit > 1 ? `, in units of ${status.scale.unit}` : ""}. ` +
    "The world changes at the next step boundary. Surplus nodes become spares.",
  field: (status) => ({
    label: "Nodes",
    value: status.scale.desired || status.scale.nodes,
    min: Math.ceil(status.scale.minimum / status.scale.unit) * status.scale.unit, // steps count from here
    max: status.scale.maximum,
    step: status.scale.unit,
  }),
  request: (job, _, value) => ({ method: "PATCH", path: jobPath(job, "scale"), body: { spec: { replicas: value } } }),
};

export const checkpoint = {
  name: "Checkpoint",
  title: () => "Write a checkpoint",
  text: () => "The workers commit at the next step boundary, the commit is written to the checkpoint directory, and training goes on.",
  request: (job) => ({ method: "POST", path: jobPath(job, "checkpoint"), body: {} }),
};

export const suspend = {
  name: "Suspend",
  title: () => "Suspend the job",
  text: (status) =>
    `The workers on ${nodesOf(status)} commit, the commit is written, and they end. ` +
    "The launchers wait until the job is resumed. Nothing trains until then.",
  request: (job) => ({ method: "POST", path: jobPath(job, "suspend"), body: {} }),
};

export const resume = {
  name: "Resume",
  title: () => "Resume the job",
  text: () => "Workers start again and continue from the last commit.",
  request: (job) => ({ method: "POST", path: jobPath(job, "resume"), body: {} }),
};

export const stop = {
  name: "Stop",
  danger: true,
  title: (status) => `Stop job ${status.job}`,
  text: (status) =>
    `The job writes a checkpoint at the next step boundary and ends: ${counted(status.world_size, "worker")} on ` +
    `${nodesOf(status)}. This cannot be undone; starting the job again continues from the checkpoint.`,
  request: (job) => ({ method: "POST", path: jobPath(job, "stop"), body: {} }),
};

export const drain = {
  name: "Drain",
  danger: true,
  title: (_, node) => `Drain node ${node.node}`,
  text: (status, node) =>
    `Node ${node.node} (${counted(node.slots, "slot")}) leaves the job gracefully, and its launcher ends. ` +
    (node.position < 0 ? "It is not in the world now." : `The job goes on with the other nodes, of ${nodesOf(status)} now.`),
  request: (job, node) => ({ method: "POST", path: jobPath(job, "drain"), body: { nodes: [node.node] } }),
};

export const cordon = {
  name: "Cordon",
  title: (_, node) => `Cordon node ${node.node}`,
  text: (_, node) =>
    `Node ${node.node} takes no part in any world until it is uncordoned. Its launcher stays. ` +
    (node.position < 0 ? "It is not in the world now." : "The world changes at the next step boundary."),
  request: (job, node) => ({ method: "POST", path: jobPath(job, "nodes", node.node, "cordon"), body: {} }),
};

export const uncordon = {
  name: "Uncordon",
  title: (_, node) => `Uncordon node ${node.node}`,
  text: (_, node) => `Node ${node.node} may take part again.`,
  request: (job, node) => ({ method: "POST", path: jobPath(job, "nodes", node.node, "uncordon"), body: {} }),
};
