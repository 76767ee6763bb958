//! The membership machines: told stories, and many random ones in a simulated world.

mod agent;
mod scale;
mod simulation;
mod stories;
mod world;
